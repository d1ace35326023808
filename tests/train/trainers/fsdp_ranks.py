"""What the tests of the sharded trainer run under torchrun:

    torchrun --nproc-per-node 2 -m tests.train.trainers.fsdp_ranks FOLDER

Rank 0 leaves results in FOLDER (tensors by case, numbers in one JSON file); `test_fsdp` judges them.
"""

import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed

from infra.object_store import ObjectStore
from tasks.train.algorithms.grpo import Grpo
from tasks.train.checkpoint import Checkpoints
from tasks.train.sequences import PreparedBatch
from tests.train.trainers.fsdp_cases import ALGORITHM, CASES, batch, masked, steps, trainer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        sharded = trainer(folder, processes=2, **case.options)
        loss, gradients = sharded.loss_and_gradients(case.batch(), Grpo(ALGORITHM))
        _keep(folder, f"{name}.gradients", gradients)
        results[name] = {"loss": loss}
    results["training"] = _training(folder)
    results["resharded"] = _from_one_process(folder)
    results["skipped"] = _poisoned_on_one_rank(folder)
    results["bfloat16"] = _bfloat16(folder)
    results["masked_step"] = trainer(folder, processes=2).train_step(masked(), Grpo(ALGORITHM))
    if distributed.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def _training(folder: Path) -> dict[str, Any]:
    """Four steps; a checkpoint after the second, from which another trainer takes the last two again."""
    checkpoints = Checkpoints(ObjectStore(str(folder / "of-two")), keep=1)
    unbroken = trainer(folder, processes=2, mini_batches=2)
    shares = [
        parameter.to_local().numel() / parameter.numel()  # type: ignore[attr-defined]
        for parameter in unbroken.model.parameters()
    ]
    metrics = steps(unbroken, range(2))
    unbroken.save(checkpoints)
    _keep(folder, "after-two", dict(unbroken.named_weights()))
    metrics += steps(unbroken, range(2, 4))
    _keep(folder, "after-four", dict(unbroken.named_weights()))
    resumed = trainer(folder, processes=2, mini_batches=2)
    torch.rand(3)
    resumed.restore(checkpoints)
    again = steps(resumed, range(2, 4))
    _keep(folder, "resumed", dict(resumed.named_weights()))
    return {"metrics": metrics, "again": again, "shares": shares, "version": resumed.version}


def _from_one_process(folder: Path) -> list[dict[str, float]]:
    sharded = trainer(folder, processes=2, mini_batches=2)
    assert sharded.restore(Checkpoints(ObjectStore(str(folder / "of-one")), keep=1))
    return steps(sharded, range(2, 4))


def _poisoned_on_one_rank(folder: Path) -> dict[str, Any]:
    """An infinite advantage in the sequence of one rank; the step must be left out on both."""
    sharded = trainer(folder, processes=2)
    before = {name: weight.clone() for name, weight in sharded.named_weights()}
    sequences = batch(0).sequences
    mask = sequences[0].loss_mask
    poisoned = replace(sequences[0], advantages=np.where(mask, np.inf, 0).astype(np.float32))
    metrics = sharded.train_step(PreparedBatch([poisoned, *sequences[1:]]), Grpo(ALGORITHM))
    same = all(torch.equal(before[name], weight) for name, weight in sharded.named_weights())
    return {"skipped": metrics["train/skipped_steps"], "same": same}


def _bfloat16(folder: Path) -> dict[str, Any]:
    sharded = trainer(folder, processes=2, compute_dtype="bfloat16")
    seen: set[str] = set()
    layer = sharded.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.register_forward_hook(lambda _, __, output: seen.add(str(output.dtype)))
    _, gradients = sharded.loss_and_gradients(batch(0), Grpo(ALGORITHM))
    _keep(folder, "bfloat16.gradients", gradients)
    sharded.train_step(batch(0), Grpo(ALGORITHM))
    return {
        "computed_in": sorted(seen),
        "gradients": sorted({str(gradient.dtype) for gradient in gradients.values()}),
        "masters": sorted({str(parameter.dtype) for parameter in sharded.model.parameters()}),
        "moments": sorted({str(state["exp_avg"].dtype) for state in sharded._optimizer.state.values()}),
    }


def _keep(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    if distributed.get_rank() == 0:
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
