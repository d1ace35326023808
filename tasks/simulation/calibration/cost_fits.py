"""Coefficients of engines and trainers, fitted to what they were measured to take. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from infra.hardware import Hardware
from infra.model_size import ModelSize
from infra.performance.calibrated import Fitted, Residual
from infra.performance.coefficients import coefficients_of
from infra.performance.iteration import BatchWork, IterationModel
from infra.performance.parallel import Parallel
from infra.performance.training import TrainingCoefficients, TrainingModel
from tasks.simulation.calibration.least_squares import costs
from tasks.trajectory import Trajectory

_VARIED = 1.3  # the largest step over the smallest, from which a fixed part can be told apart
_PASSES = 3  # forward, and twice that backward
_FREE = 1e-9  # seconds a token where none were found


@dataclass(frozen=True, slots=True)
class Placed:
    """Where engines or a trainer were: `count` engines, or devices of the trainer."""

    hardware: Hardware
    count: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    """Of one engine; a trainer's devices are data parallel where nothing else is said."""


def fit_training(
    size: ModelSize, trainer: Placed, steps: Sequence[tuple[Sequence[int], float]], engine: Fitted
) -> Fitted:
    """`step_s` and `kernel_share` of a trainer, from (lengths of the batch, seconds) of its steps.

    A step is a fixed part, and the model's seconds of its tokens over a share. Where all steps are of about
    the same size, the fixed part cannot be told apart and is 0. The share is on top of what `engine` says of
    the same hardware's kernels. Raises ValueError without a step.
    """
    if not steps:
        raise ValueError("a trainer is fitted on at least one train step")
    parallel = trainer.parallel
    if parallel.devices != trainer.count:
        parallel = Parallel(data=trainer.count)
    alone = TrainingCoefficients(kernel_share=1.0, step_s=0.0, micro_batch_s=0.0, recompute=False)
    kernels = coefficients_of(trainer.hardware).changed(engine.iteration)
    unit = TrainingModel(size, trainer.hardware, parallel, alone, kernels)
    computed = [_PASSES * unit.forward_seconds(lengths) for lengths, _ in steps]
    update = unit.step_seconds(steps[0][0]) - computed[0]  # reduction and optimiser, the same each step
    seconds = [taken - update for _, taken in steps]
    if max(computed) > _VARIED * min(computed):
        scale, fixed = costs([[value, 1.0] for value in computed], seconds)
    else:
        (scale,), fixed = costs([[value] for value in computed], seconds), 0.0
    share = 1 / max(scale, 1e-9)
    predicted = [scale * value + fixed + update for value in computed]
    return Fitted(
        training={
            "kernel_share": share,
            "expert_kernel_share": share,
            "step_s": fixed,
            "micro_batch_s": 0.0,
            "recompute": False,
        },
        residuals={"train_step": residual(predicted, [taken for _, taken in steps])},
    )


def fit_engine_turns(
    size: ModelSize, engines: Placed, trajectories: Sequence[Trajectory], generating_s: float
) -> Fitted:
    """`iteration_s` as a run's turns show it: what an iteration took beyond the model's kernels.

    A turn's seconds are its tokens times those of an iteration. How many turns an engine had at a time is
    their seconds over the `generating_s` in which engines generated (Little's law), and what the kernels of
    such a batch take by the hardware's coefficients is left out. It holds for about that many at a time.
    """
    turns = [(each, turn) for each in trajectories for turn in each.turns if turn.generate_seconds > 0]
    if not turns or generating_s <= 0:
        raise ValueError("an engine is fitted on at least one turn")
    sampled = [float(turn.response_end - turn.response_start) for _, turn in turns]
    seconds = [turn.generate_seconds for _, turn in turns]
    iteration, waits = costs([[tokens, 1.0] for tokens in sampled], seconds)
    running = max(round(sum(seconds) / generating_s / engines.count), 1)
    context = statistics.fmean(turn.response_end for _, turn in turns)
    own = replace(coefficients_of(engines.hardware), iteration_s=0.0, sequence_s=0.0, layer_s=0.0)
    kernels = IterationModel(size, engines.hardware, engines.parallel, own).seconds(
        BatchWork(running, round(running * context))
    )
    predicted = [iteration * tokens + waits for tokens in sampled]
    return Fitted(
        iteration={"iteration_s": max(iteration - kernels, 0.0), "sequence_s": 0.0, "layer_s": 0.0},
        residuals={"turn": residual(predicted, seconds)},
    )


def fit_engine_work(
    size: ModelSize, engine: Placed, work: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> Fitted:
    """`iteration_s`, `sequence_s` and `gemm_compute` of an engine, from its own counters.

    A row of `work` is iterations, tokens sampled and context tokens computed in some stretch, in which it
    worked for so many seconds. Every token costs its products; a sampled one `sequence_s` and its share of
    the output layer besides.
    """
    rows = [[iterations, sampled, sampled + context] for iterations, sampled, context in work]
    iteration, sequence, token = costs(rows, seconds)
    products = size.layers * size.attention_parameters + size.dense_layers * size.dense_parameters
    peak = engine.hardware.tflops * 1e12
    share = 2 * products / (max(token, _FREE) * peak)
    head = 2 * size.embedding_parameters / (share * peak)
    predicted = [iteration * a + sequence * b + token * c for a, b, c in rows]
    return Fitted(
        iteration={
            "iteration_s": iteration,
            "sequence_s": max(sequence - head, 0.0),
            "layer_s": 0.0,
            "gemm_compute": share,
            "gemm_bandwidth": 1.0,
        },
        residuals={"engine": residual([sum(predicted)], [sum(seconds)])},
    )


def residual(predicted: Sequence[float], measured: Sequence[float]) -> Residual:
    errors = sorted(abs(ours / theirs - 1) for ours, theirs in zip(predicted, measured, strict=True))
    return Residual(
        count=len(errors),
        median=statistics.median(errors),
        p90=errors[min(int(0.9 * len(errors)), len(errors) - 1)],
    )
