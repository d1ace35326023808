"""A campaign: one frozen tree that describes a run whole, read from a YAML file and saved with the run."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from infra.config import Config
from tasks.environment.config import DomainConfig, EnvironmentConfig
from tasks.model.config import ModelConfig
from tasks.reward.config import RewardConfig
from tasks.rollout.config import RolloutConfig
from tasks.train.config import TrainConfig
from tasks.weights.config import PublicationConfig


class CampaignError(ValueError):
    """A campaign that cannot run. The message has a line an option, each naming the option to change."""


class EvaluationConfig(Config):
    episodes: PositiveInt = 200
    """Held-out episodes of each domain."""
    every: NonNegativeInt = 0
    """Train steps between evaluations during training; 0 evaluates only before and after."""
    seed: NonNegativeInt = 1_000_000_007
    """First of the held-out seeds; training never draws from them."""


class StoresConfig(Config):
    """fsspec URLs. An empty one lies in the run's folder."""

    runs: str = "runs"
    """Where a run's own folder goes: a local directory."""
    samples: str | None = None
    weights: str | None = None
    checkpoints: str | None = None
    evict_samples: bool = True
    """Remove trajectories that can no longer be trained while the run goes on, and not only at its end. Every
    trained one is in the run's archive all the same. Off suits ext4: it is slow to create files (0.7 ms
    instead of 0.06) for minutes after others were removed, since it will not reuse their inodes at once."""


class TrackersConfig(Config):
    tensorboard: bool = True
    prefect_artifacts: bool = True
    """Tables in the Prefect dashboard after each step."""
    report: bool = True
    """One HTML file at the end of the run."""


class Campaign(Config):
    """One RL campaign, from the model to the report."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    seed: NonNegativeInt = 0
    model: ModelConfig = Field(default_factory=ModelConfig)
    domains: dict[str, DomainConfig] = Field(min_length=1)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    weights: PublicationConfig = Field(default_factory=PublicationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    stores: StoresConfig = Field(default_factory=StoresConfig)
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)

    @model_validator(mode="after")
    def _budgets_fit_the_model(self) -> "Campaign":
        if self.model.path is None:
            context = self.model.build.max_context
            for name, domain in self.domains.items():
                if domain.max_tokens > context:
                    raise ValueError(
                        f"domains.{name}.max_tokens ({domain.max_tokens}) is above model.build.max_context "
                        f"({context}): change one of them"
                    )
        return self

    @model_validator(mode="after")
    def _budgets_fit_the_trainer(self) -> "Campaign":
        tokens = self.train.trainer.micro_batch_tokens
        for name, domain in self.domains.items():
            if domain.max_tokens > tokens:
                raise ValueError(
                    f"domains.{name}.max_tokens ({domain.max_tokens}) is above "
                    f"train.trainer.micro_batch_tokens ({tokens}): change one of them"
                )
        return self

    @classmethod
    def parse(cls, data: Any) -> "Campaign":
        """Validate plain data. Raises `CampaignError`."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [_describe(detail) for detail in error.errors()]
            raise CampaignError("the campaign cannot run:\n" + "\n".join(lines)) from None

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> "Campaign":
        """Read a YAML file; `overrides` are `dotted.option=value`. Raises `CampaignError`."""
        try:
            data = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise CampaignError(f"cannot read the campaign file: {error}") from None
        except yaml.YAMLError as error:
            raise CampaignError(f"{path} is not YAML: {error}") from None
        for override in overrides or []:
            option, separator, value = override.partition("=")
            if not separator:
                raise CampaignError(f"{override!r} is not of the form option=value")
            _set(data, option.split("."), yaml.safe_load(value))
        return cls.parse(data)

    def dump(self) -> str:
        """The campaign as YAML, every option written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _set(data: Any, path: list[str], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data, dict):
            raise CampaignError(f"{'.'.join(path)}: there is no such option")
        data = data.setdefault(key, {})
    data[path[-1]] = value


def _describe(detail: Any) -> str:
    option = ".".join(str(part) for part in detail["loc"]) or "campaign"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "there is no such option"
    elif detail["type"] != "value_error" and detail["type"] != "missing":
        message = f"{message} (it is {detail['input']!r})"
    return f"  {option}: {message}"
