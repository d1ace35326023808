"""The trainers. `make_trainer` makes the one that a campaign names."""

from pathlib import Path

from tasks.train.config import MegatronTrainerConfig, TorchTrainerConfig
from tasks.train.trainers.base import PolicyTrainer


def make_trainer(
    config: TorchTrainerConfig | MegatronTrainerConfig,
    directory: str | Path,
    *,
    temperature: float,
    seed: int,
    steps: int,
) -> PolicyTrainer:
    """The trainer of `train.trainer` for the model in `directory`.

    With more than one process every rank calls this, after torch.distributed is initialised with as many
    ranks as `config.processes`. Raises ValueError when it is not, and whatever the trainer refuses.
    """
    if isinstance(config, TorchTrainerConfig):
        from tasks.train.trainers.torch import TorchTrainer

        return TorchTrainer(directory, config, temperature=temperature, seed=seed, steps=steps)
    # Imported here, since megatron-core is an optional package.
    from tasks.train.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer(directory, config, temperature=temperature, seed=seed, steps=steps)
