"""What a campaign says of reward workers and of the function service that rewards may run on."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from infra.config import Config


class ServerlessConfig(Config):
    """A function service, reached through Lithops. `infra/deploy/serverless/` has a worked page a service."""

    backend: str
    """Lithops' name of the compute back end: `localhost`, `aliyun_fc`, `aws_lambda`, `knative`, `k8s`, …"""
    storage: str | None = None
    """Lithops' name of the storage back end: `aliyun_oss`, `aws_s3`, `minio`, …; or `config_file`'s."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Sections of Lithops' configuration, over those of `config_file`. It is saved with the run, so secrets
    belong in `config_file`, in `block` or in the environment."""
    config_file: str | None = None
    """A Lithops configuration file on the machines of the environment workers; without one, where Lithops
    looks by itself (LITHOPS_CONFIG_FILE, ~/.lithops/config)."""
    block: str | None = None
    """Name of a saved Prefect block `tutti-functions`, whose sections come before those of `config`."""
    prefix: str = Field(default="tutti.rewards", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Where in Lithops' storage rewards and results lie; what is under it is deleted when the run ends."""
    batch_size: PositiveInt = 32
    """Most rewards that travel together."""
    linger_s: NonNegativeFloat = 0.01
    """How long a reward waits for others to fill its batch."""
    activations: PositiveInt = 2
    """Most activations at a time, for each environment worker."""
    processes: PositiveInt = 1
    """Killable reward processes in one activation."""
    warm_workers: NonNegativeInt = 1
    """Activations started before the first reward, where `idle_s` keeps them."""
    idle_s: NonNegativeFloat | None = None
    """How long an activation without work waits for more before it ends. 0 ends it with its batch, which
    suits services that bill by the second and keep containers warm by themselves. By default 60 on
    `localhost`, where each activation costs a process, and 0 elsewhere."""
    life_s: PositiveFloat = 240.0
    """An activation of this age takes no more work. With a batch's time, keep it under the service's."""
    memory_mb: PositiveInt | None = None
    """Memory of an activation; by default the most that a function's `@serverless` asks."""
    retries: NonNegativeInt | None = None
    """New tries of a reward whose activation failed or was lost; by default what its `@serverless` asks."""
    retry_pause_s: NonNegativeFloat = 0.5
    """Pause before the first new try; it doubles with each, to 30 s at most."""
    start_limit_s: PositiveFloat = 120.0
    """An activation that has not reported by then is lost. Covers a cold start and an image's pull."""
    silence_limit_s: PositiveFloat = 20.0
    """An activation that reported and then says nothing for this long is lost; it says something three times
    as often."""
    poll_s: PositiveFloat = 0.02
    """Pause between two looks at the storage for results, or for work. Object stores charge for each look:
    0.2 suits them."""
    max_waiting: PositiveInt = 1024
    """Rewards sent or waiting at a time; above it, episodes wait before they ask."""

    @field_validator("backend")
    @classmethod
    def _backend_exists(cls, backend: str) -> str:
        known = known_backends()
        if known is None:
            raise ValueError(
                "rewards on a function service need Lithops: pip install 'tutti[serverless]', or leave out "
                "reward.serverless to judge on local workers"
            )
        if backend not in known:
            raise ValueError(f"Lithops has no compute back end {backend!r}; change it to one of {known}")
        return backend

    @model_validator(mode="after")
    def _storage_is_reachable(self) -> "ServerlessConfig":
        if self.storage == "localhost" and self.backend != "localhost":
            raise ValueError(
                f"storage: localhost cannot be reached by {self.backend}; name an object store, for example "
                "aws_s3, aliyun_oss or minio"
            )
        return self

    @property
    def idle_limit_s(self) -> float:
        if self.idle_s is not None:
            return self.idle_s
        return 60.0 if self.backend == "localhost" else 0.0


class RewardConfig(Config):
    workers: PositiveInt = 1
    """Warm, killable reward processes per environment worker."""
    memory_mb: PositiveInt | None = 4096
    """Address space of one such process, local or in an activation; null for no limit. A reward that needs
    more fails as an infrastructure error."""
    serverless: ServerlessConfig | None = None
    """Function service for the reward functions declared `@serverless`; without one they run on `workers`."""


def known_backends() -> list[str] | None:
    """Compute back ends of the installed Lithops, by name; None without Lithops. Imports nothing of it."""
    found = find_spec("lithops")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "serverless/backends"
    return sorted(["localhost", *(path.parent.name for path in folder.glob("*/__init__.py"))])
