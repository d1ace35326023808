"""A campaign: one frozen tree that describes a run whole, read from a YAML file and saved with the run."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from infra.affinity import Affinity, UnknownAffinity, WorkerClass
from infra.config import Config
from infra.credentials import CredentialsInUrl, refuse_credentials
from infra.hardware import CATALOGUE, Hardware, hardware, plain_name
from infra.resources import preferred_pool
from tasks.environment.config import DomainConfig, EnvironmentConfig
from tasks.model.config import ModelConfig
from tasks.reward.config import RewardConfig
from tasks.rollout.affinity_config import AffinityConfig, require_known
from tasks.rollout.config import RolloutConfig
from tasks.simulation.what_if.plan_config import PlanConfig
from tasks.train.config import TrainConfig
from tasks.train.modes import MODES
from tasks.weights.config import PublicationConfig


class CampaignError(ValueError):
    """A campaign that cannot run. The message has a line an option, each naming the option to change."""


# It becomes part of metrics, file names and Dask keys.
DomainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+@,-]*$")]


WorkPool = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$")]


class EvaluationConfig(Config):
    episodes: PositiveInt = 200
    """Held-out episodes of each domain."""
    every: NonNegativeInt = 0
    """Train steps between evaluations during training; 0 evaluates only before and after."""
    seed: NonNegativeInt = 1_000_000_007
    """First of the held-out seeds; training never draws from them."""


class StoresConfig(Config):
    """Where a run lies: fsspec URLs, without credentials (`infra.credentials` says how these travel)."""

    root: str | None = None
    """All of a run lies under `<root>/<run>`, for example s3://bucket/prefix: sample buffer with its archive,
    weights and checkpoints, and a copy of its files and of the model built for it. The run can then be read,
    and resumed, from anywhere. Empty: all of it lies in the run's local folder."""
    runs: str = "runs"
    """Where a run's own folder goes: a local directory. With `root`, its files are uploaded from there."""
    samples: str | None = None
    """Another place for the sample buffer and its archive."""
    weights: str | None = None
    """Another place for published weights."""
    checkpoints: str | None = None
    """Another place for checkpoints."""
    block: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of a saved Prefect block "Tutti object store" whose options and credentials open these URLs.
    Empty: they are in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL ...)."""
    upload_every_s: PositiveFloat = 10
    """Seconds between uploads of the run's files. A crash of the machine loses at most this much of them."""
    evict_samples: bool = True
    """Remove trajectories that can no longer be trained while the run goes on, and not only at its end. Every
    trained one is in the run's archive all the same. Off suits ext4: it is slow to create files (0.7 ms
    instead of 0.06) for minutes after others were removed, since it will not reuse their inodes at once."""

    @property
    def urls(self) -> dict[str, str]:
        """The configured URLs of stores, by option."""
        named = {name: getattr(self, name) for name in ("root", "samples", "weights", "checkpoints")}
        return {name: url for name, url in named.items() if url}

    @model_validator(mode="after")
    def _urls_say_where_and_not_who(self) -> "StoresConfig":
        for name, url in self.urls.items():
            try:
                refuse_credentials(url)
            except CredentialsInUrl as error:
                raise ValueError(f"stores.{name}: {error}") from None
            if "://" in url and ".." in url.split("/"):
                raise ValueError(f"stores.{name} has a part '..': write where the store lies without it")
        if self.block is not None and not any("://" in url for url in self.urls.values()):
            raise ValueError("stores.block opens remote stores, and there is none: set stores.root to a URL")
        return self


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


WorkPools = Annotated[tuple[WorkPool, ...], BeforeValidator(_several), Field(min_length=1)]


class PoolsConfig(Config):
    """Prefect work pools, by what they do for the run. Each needs an online worker and a deployment
    `pool-host/<pool>`; `make up` brings these to life on one machine. A role that is left out gets its pool
    from `hardware`, by its class: rollout the bandwidth GPU, train the compute GPU, environment CPUs, reward
    the cheapest GPU."""

    rollout: WorkPools
    """Engines are spread over these, one name or a list; the proxy is on the first."""
    train: WorkPool
    environment: WorkPool
    """Hosts the environments' Dask cluster, unless `environment.scheduler` names another."""
    reward: WorkPool
    """Rewards that are not serverless are computed beside the environments."""
    prefill: Annotated[tuple[WorkPool, ...], BeforeValidator(_several)] = ()
    """Where prefill workers (`rollout.engine.prefill_workers`) are; empty: on the rollout pools."""
    hardware: dict[WorkPool, str] = {}
    """Hardware of pools, by its name in the catalogue (infra/hardware.py): h20, h800, cpu ... A pool that has
    such a name itself need not be here. Pools that only stand here are spare: one may take the place of a
    pool that is not available."""
    devices: dict[WorkPool, PositiveInt] = {}
    """Devices of a pool, 1 where nothing is said: whether a model fits that is split over them."""
    queue: str = "campaigns"
    """Work queue of the pools from which the hosts are started."""
    address: str = "127.0.0.1"
    """Where this run's hosts find the campaign: an address of its machine, or `auto` for the one by which it
    reaches the Prefect server. Services on a host bind the address by which that reaches the campaign."""
    start_limit_s: PositiveFloat = 300.0
    """A host that has not reported by then is one error."""

    @model_validator(mode="before")
    @classmethod
    def _roles_by_worker_class(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("hardware"), dict):
            return data
        known = {
            pool: CATALOGUE[plain_name(str(name))]
            for pool, name in data["hardware"].items()
            if plain_name(str(name)) in CATALOGUE
        }
        hosts = {pool: entry for pool, entry in known.items() if entry.kind != "serverless"}
        roles: tuple[WorkerClass, ...] = ("rollout", "train", "environment", "reward")
        missing = [role for role in roles if role not in data]
        return {**data, **{role: preferred_pool(role, hosts) for role in missing if hosts}}

    @field_validator("hardware")
    @classmethod
    def _hardware_is_known(cls, value: dict[str, str]) -> dict[str, str]:
        return require_known(value)

    def hardware_of(self, pool: str) -> Hardware | None:
        """None where neither `hardware` nor the pool's own name tells."""
        return hardware(self.hardware[pool]) if pool in self.hardware else CATALOGUE.get(plain_name(pool))

    @property
    def names(self) -> dict[str, str]:
        """Each pool, with the first option that names it."""
        options = {
            **dict.fromkeys(self.prefill, "pools.prefill"),
            self.reward: "pools.reward",
            self.environment: "pools.environment",
            **dict.fromkeys(self.rollout, "pools.rollout"),
            self.train: "pools.train",
        }
        return dict(sorted(options.items()))


class SupervisionConfig(Config):
    """How it is found out that a part of the run is frozen. One that ended is seen at once."""

    every_s: PositiveFloat = 5.0
    """Seconds between signs of life."""
    silence_limit_s: PositiveFloat = 60.0
    """A part that gave no sign of life for so long is lost, and the run ends; a Dask worker is restarted."""

    @model_validator(mode="after")
    def _limit_has_a_sign(self) -> "SupervisionConfig":
        if self.silence_limit_s < self.every_s:
            raise ValueError(
                f"supervision.silence_limit_s ({self.silence_limit_s:g}) must be at least "
                f"supervision.every_s ({self.every_s:g})"
            )
        return self


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
    domains: dict[DomainName, DomainConfig] = Field(min_length=1)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    weights: PublicationConfig = Field(default_factory=PublicationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    stores: StoresConfig = Field(default_factory=StoresConfig)
    pools: PoolsConfig | None = None
    """Where the services of the run start: on the hosts of these work pools. Empty: as processes here."""
    affinity: AffinityConfig = Field(default_factory=AffinityConfig)
    """Which rollout pool serves which domain."""
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    plan: PlanConfig | None = None
    """Simulate the campaign before it starts. Empty: it starts at once."""

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

    @model_validator(mode="after")
    def _engines_fill_the_pools(self) -> "Campaign":
        pools = self.rollout_pools
        option = "affinity.local_pools" if self.pools is None else "pools.rollout"
        workers = self.rollout.engine.workers - getattr(self.rollout.engine, "prefill_workers", 0)
        if workers < len(pools):
            raise ValueError(
                f"rollout.engine.workers ({workers}) is below the number of pools in "
                f"{option} ({len(pools)}): each pool needs an engine that generates"
            )
        return self

    @property
    def rollout_pools(self) -> dict[str, Hardware | None]:
        """The rollout pools that the campaign names, each with its hardware where that is known."""
        if self.pools is None:
            return {pool: self.affinity.hardware_of(pool) for pool in self.affinity.local_pools}
        return {pool: self.pools.hardware_of(pool) for pool in self.pools.rollout}

    @model_validator(mode="after")
    def _affinity_fits_domains_and_pools(self) -> "Campaign":
        affinity = self.affinity
        if self.pools is not None and affinity.local_pools:
            raise ValueError(
                "affinity.local_pools are for a run on this machine, and pools are given: name them in "
                "pools.rollout and pools.hardware"
            )
        try:
            Affinity.of(affinity.domains).check(self.domains, self.rollout_pools, "affinity.domains")
        except UnknownAffinity as error:
            raise ValueError(str(error)) from None
        unknown = sorted(pool for pool, entry in self.rollout_pools.items() if entry is None)
        if affinity.profile != "off" and (unknown or not self.rollout_pools):
            missing = f"that of {', '.join(unknown)} is not known" if unknown else "there is no named pool"
            raise ValueError(
                f"affinity.profile ({affinity.profile}) needs the hardware of the rollout pools, and "
                f"{missing}: name it in {'affinity.local_pools' if self.pools is None else 'pools.hardware'}"
            )
        return self

    @model_validator(mode="after")
    def _lockstep_has_room(self) -> "Campaign":
        """A trajectory that waits for a place would be waited for by those that hold the places."""
        batch = self.train.groups * self.train.group_size
        places = self.environment.concurrent_trajectories
        if MODES[self.train.mode].lockstep and places < batch:
            raise ValueError(
                f"environment.concurrent_trajectories ({places}) is below the {batch} trajectories of a "
                f"batch, which mode {self.train.mode} runs in lockstep: raise it, or take mode sync_plus"
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
