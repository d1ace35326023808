"""TRL's GRPOTrainer on the benchmark's policy and domains: the reference Tutti's throughput is compared with.

Run by the python of TRL's own environment, on the CPU, without vLLM:

    python tests/bench/trl_reference.py --model DIR --steps 20 --seed 0
    python tests/bench/trl_reference.py --model DIR --steps 20 --seed 0 --multi-turn --turns 4 --latency-ms 50

It prints one JSON line: `trajectories_per_second` (64 over the median of the steps after the first three),
`step_seconds` (all steps, generation and training together, the first three are warm-up), `rewards` (mean of
each step), `trl` and `threads`, and with `--multi-turn` also `turns` and `latency_ms`.

TRL has every fair advantage: fp32 without autocast, no gradient checkpointing, the KV cache, no padding
beyond the batch's own longest row, the fused AdamW, the whole batch in one pass, no reference model, no
evaluation, log, report, progress bar or checkpoint; generation and training are aligned, so the old
log-probabilities are never recomputed. On a quiet machine of two cores, two torch threads are about a third
quicker than one, so two is the default. Beside other busy processes two threads lose most of their time
spinning at OpenMP's barriers (steps take ten times longer): measure there with `--threads 1`, or with
`OMP_WAIT_POLICY=PASSIVE` in the environment. Transformers' continuous batching is about ten times slower
than its plain `generate` on this policy, so it is off.

Multi-turn uses `rollout_func`. TRL 1.16 offers two ways, and both work without vLLM. `environment_factory`
reads actions from tool calls, which a policy of four tokens a turn cannot write, and its tool loop steps the
environments of a batch one after another (only several calls of one episode overlap): 64 episodes of 4 turns
of 50 ms would wait for 12.8 s a step. `rollout_func` leaves the loop to the user, who steps all episodes of
the batch at once, a thread each, and generates for all of them when the last has answered: a barrier a turn,
since a row cannot join a running `generate`. That is what is measured here, and the KV cache is kept across
turns. A response that its budget cuts is closed by an end token that is not trained, as the template has it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a run as a plain script, from anywhere

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from tests.bench.domains import SlowTurns, Sums

PROMPTS, GENERATIONS = 8, 8
TRAJECTORIES = PROMPTS * GENERATIONS  # of one optimiser step
SINGLE_TURN_TOKENS = 8
MULTI_TURN_TOKENS = 4  # of one turn
WARM_UP_STEPS = 3


class StepTimes(TrainerCallback):
    """Wall time of each optimiser step, from the end of the one before: nothing of a step escapes it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


class Rewards:
    """TRL's reward functions, which also note each step's mean reward."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def exact_sum(self, completions: list[Any], seed: list[int], **kwargs: Any) -> list[float]:
        """What `Sums` gives for each completion."""
        rewards = []
        for completion, episode in zip(completions, seed, strict=True):
            environment = Sums()
            environment.reset(episode)
            rewards.append(environment.step(completion[0]["content"]).reward)
        return self._noted(rewards)

    def episode_return(self, episode_return: list[float], **kwargs: Any) -> list[float]:
        """What the environments of the rollout gave."""
        return self._noted(episode_return)

    def _noted(self, rewards: list[float]) -> list[float]:
        self.means.append(statistics.fmean(rewards))
        return rewards


class SlowTurnsRollout:
    """`rollout_func` for `SlowTurns`: one batched generation a turn, all episodes stepped at once."""

    def __init__(self, turns: int, latency_ms: float, tokenizer: PreTrainedTokenizerBase) -> None:
        self._turns = turns
        self._latency_ms = latency_ms
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(TRAJECTORIES)
        self._generation = GenerationConfig(
            max_new_tokens=MULTI_TURN_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            use_cache=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play one episode a prompt. `prompts` comes repeated, `num_generations` times each."""
        environments = [SlowTurns(self._turns, self._latency_ms) for _ in prompts]
        observations = [e.reset(p[-1]["seed"]) for e, p in zip(environments, prompts, strict=True)]
        returns = [0.0] * len(prompts)
        tokenizer = self._tokenizer

        # Rows keep their padding between turns, as holes of the attention mask: the KV cache stays valid.
        ids = torch.empty(len(prompts), 0, dtype=torch.long)
        attended = torch.empty_like(ids)
        sampled = torch.empty_like(ids)
        cache, prompt_ids = None, []
        with (
            unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
            torch.no_grad(),
        ):
            for turn in range(self._turns):
                added = self._rendered(observations)
                if turn == 0:
                    prompt_ids = added
                else:
                    added = [
                        row if ended else [tokenizer.eos_token_id, *row]
                        for row, ended in zip(added, self._ended(ids, attended), strict=True)
                    ]
                padded, mask = _left_padded(added, tokenizer.pad_token_id)
                ids, attended = torch.cat([ids, padded], 1), torch.cat([attended, mask], 1)
                sampled = torch.cat([sampled, torch.zeros_like(mask)], 1)
                output = model.generate(
                    input_ids=ids,
                    attention_mask=attended,
                    cache=cache,
                    generation_config=self._generation,
                )
                cache = output.past_key_values
                response = output.sequences[:, ids.shape[1] :]
                real = _up_to_first(response, tokenizer.eos_token_id)
                ids = output.sequences
                attended, sampled = torch.cat([attended, real], 1), torch.cat([sampled, real], 1)
                actions = tokenizer.batch_decode(
                    [row[keep.bool()].tolist() for row, keep in zip(response, real, strict=True)],
                    skip_special_tokens=True,
                )
                results = list(self._pool.map(lambda e, a: e.step(a), environments, actions))
                observations = [result.observation for result in results]
                returns = [total + result.reward for total, result in zip(returns, results, strict=True)]
        completion_ids, mask_lists = [], []
        for row, keep, own, prompt in zip(ids, attended.bool(), sampled, prompt_ids, strict=True):
            completion_ids.append(row[keep].tolist()[len(prompt) :])
            mask_lists.append(own[keep].tolist()[len(prompt) :])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
            "env_mask": mask_lists,
            "episode_return": returns,
        }

    def _rendered(self, observations: list[str]) -> list[list[int]]:
        conversations = [[{"role": "user", "content": text}] for text in observations]
        rows = self._tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return cast(list[list[int]], rows)

    def _ended(self, ids: Tensor, attended: Tensor) -> list[bool]:
        """Whether each row's last real token is the end token."""
        places = torch.arange(ids.shape[1]).expand_as(ids)
        last = (places * attended).argmax(1, keepdim=True)
        ended: list[bool] = (ids.gather(1, last).squeeze(1) == self._tokenizer.eos_token_id).tolist()
        return ended


def _left_padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both [rows, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _up_to_first(response: Tensor, end: int) -> Tensor:
    """1 up to and with each row's first end token, 0 after it; [rows, length] as `response`."""
    is_end = (response == end).long()
    return ((is_end.cumsum(1) - is_end) == 0).long()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train for `options.steps` optimiser steps; returns what the script prints."""
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    times, rewards = StepTimes(), Rewards()
    seeds = range(options.seed, options.seed + options.steps * PROMPTS)
    environment = SlowTurns(options.turns, options.latency_ms) if options.multi_turn else Sums()
    rows = []
    for seed in seeds:
        message = {"role": "user", "content": environment.reset(seed)}
        # rollout_func is given the prompts and no other column: the message carries the episode's seed.
        rows.append(
            {"prompt": [{**message, "seed": seed}] if options.multi_turn else [message], "seed": seed}
        )
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            max_steps=options.steps,
            seed=options.seed,
            per_device_train_batch_size=TRAJECTORIES,
            gradient_accumulation_steps=1,
            num_generations=GENERATIONS,
            max_completion_length=SINGLE_TURN_TOKENS,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            shuffle_dataset=False,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            use_vllm=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            eval_strategy="no",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=rewards.episode_return if options.multi_turn else rewards.exact_sum,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[times],
            rollout_func=SlowTurnsRollout(options.turns, options.latency_ms, tokenizer)
            if options.multi_turn
            else None,
        )
        trainer.remove_callback(PrinterCallback)  # it would write to stdout
        trainer.train()
    result = {
        "trajectories_per_second": TRAJECTORIES / statistics.median(times.seconds[WARM_UP_STEPS:]),
        "step_seconds": [round(seconds, 5) for seconds in times.seconds],
        "rewards": [round(mean, 5) for mean in rewards.means],
        "trl": trl.__version__,
        "threads": options.threads,
    }
    if options.multi_turn:
        result |= {"turns": options.turns, "latency_ms": options.latency_ms}
    return result


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory that small_llama.py wrote")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps, above 3: those are warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--multi-turn", action="store_true", help="SlowTurns instead of Sums")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, the warm-up steps; it is {options.steps}")
    return options


if __name__ == "__main__":
    print(json.dumps(train(parse_options())))
