"""The cluster file of a simulation: which hardware does what of a campaign, and what work that campaign is.

A campaign says how it trains, as it does for a real run; this says on what. Everything that it asks of the
hardware is checked before anything is simulated.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from infra.config import Config
from infra.hardware import Hardware, UnknownHardware, hardware
from infra.performance.distributions import Distribution, constant
from infra.performance.parallel import Parallel
from tasks.rollout.affinity_config import PoolName
from tasks.rollout.routing import WorkerRole
from tasks.simulation.workload import DomainWorkload


class ClusterError(ValueError):
    """A cluster that cannot run the campaign. The message has a line an option, with the numbers."""


class PoolSpec(Config):
    """A pool of equal devices."""

    hardware: str
    """Name in the catalogue (infra/hardware.py)."""
    devices: PositiveInt
    devices_per_node: PositiveInt = 8
    """Devices that one machine has: these are joined by the fast links."""
    usd_per_hour: NonNegativeFloat | None = None
    """Rent of one device; the catalogue's where nothing is said."""

    @model_validator(mode="after")
    def _hardware_is_known(self) -> "PoolSpec":
        try:
            hardware(self.hardware)
        except UnknownHardware as error:
            raise ValueError(f"hardware: {error}") from None
        return self

    @property
    def entry(self) -> Hardware:
        return hardware(self.hardware)

    @property
    def price(self) -> float:
        """USD an hour of one device."""
        return self.entry.usd_hour if self.usd_per_hour is None else self.usd_per_hour


class EnginesSpec(Config):
    """Equal inference engines on one pool, as many as its devices make."""

    pool: PoolName
    devices: PositiveInt
    """Of all these engines together."""
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    """Ranks over which the experts are spread; it divides tensor_parallel x data_parallel."""
    data_parallel: PositiveInt = 1
    """Copies of the attention in one engine."""
    role: WorkerRole = "both"
    """`prefill` engines compute contexts for `decode` engines; `both` does all of a turn."""
    max_running: PositiveInt = 256
    """Requests in one batch (vLLM's max_num_seqs)."""
    max_batch_tokens: PositiveInt = 8192
    """Tokens in one iteration (vLLM's max_num_batched_tokens)."""
    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a device's memory that weights and KV may take."""
    prefix_cache: bool = True
    block_tokens: PositiveInt = 16
    """Tokens of a block of KV: a cached context is reused in whole blocks."""

    @model_validator(mode="after")
    def _devices_make_engines(self) -> "EnginesSpec":
        each = self.tensor_parallel * self.pipeline_parallel * self.data_parallel
        if self.devices % each:
            raise ValueError(
                f"devices ({self.devices}) must be a multiple of the {each} of one engine (tensor_parallel x "
                "pipeline_parallel x data_parallel): change one of them"
            )
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_running ({self.max_running}), each "
                "of which may decode a token in an iteration: raise the one or lower the other"
            )
        if self.tensor_parallel * self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel ({self.expert_parallel}) must divide tensor_parallel x data_parallel "
                f"({self.tensor_parallel} x {self.data_parallel}): change one of them"
            )
        return self

    @property
    def parallel(self) -> Parallel:
        return Parallel(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            expert=self.expert_parallel,
            data=self.data_parallel,
        )

    @property
    def engines(self) -> int:
        return self.devices // self.parallel.devices


class TrainSpec(Config):
    """The trainer's devices."""

    pool: PoolName
    devices: PositiveInt
    tensor_parallel: PositiveInt | None = None
    """This and the next two are chosen where they are left out: the quickest that fits in memory. Data
    parallelism takes what is left."""
    pipeline_parallel: PositiveInt | None = None
    expert_parallel: PositiveInt | None = None
    colocated: bool = False
    """Train on devices that also generate, one after the other: for modes that do not overlap the two. The
    training state then waits in host memory while engines generate."""
    host_gb_s: PositiveFloat = 25.0
    """With colocated: between host memory and each device, 10**9 bytes a second and direction. PCIe 5 x16
    carries at most 63, of which copies from pinned memory reach a good part; this is cautious."""
    checkpoint_gb_s: PositiveFloat | None = None
    """At which each device writes a checkpoint while the trainer waits, 10**9 bytes a second. Empty: it is
    written beside training and takes none of its time."""


class EnvironmentSpec(Config):
    pool: PoolName
    places: PositiveInt | None = None
    """Trajectories at a time; empty is without bound."""


class RewardSpec(Config):
    kind: Literal["local", "functions", "dedicated"] = "local"
    """`local` workers are beside the environments, `dedicated` ones hold devices of `pool` all the time,
    `functions` exist while they work and a while longer."""
    workers: PositiveInt | None = None
    """Rewards that are judged at a time; empty is without bound, but for `dedicated`."""
    pool: PoolName | None = None
    """The devices of `dedicated` workers, one each, or the functions' hardware."""
    cold_start_s: Distribution = Field(default_factory=lambda: constant(0.0))
    keep_alive_s: NonNegativeFloat = 60.0
    """How long a function stays warm after a call."""

    @model_validator(mode="after")
    def _dedicated_workers_are_somewhere(self) -> "RewardSpec":
        if self.kind == "dedicated" and (self.workers is None or self.pool is None):
            raise ValueError("dedicated workers need `workers` and `pool`: each takes a device of it")
        return self


class WeightsSpec(Config):
    """How a new version reaches the engines."""

    transport: Literal["nccl", "tcp", "rdma", "mooncake", "store"] = "mooncake"
    """By `nccl`, `tcp` and `rdma` the trainer sends straight to the engines, which wait for it as it does; by
    the others it pushes beside rollout into a store, from which engines pull beside generation."""
    push_gb_s: PositiveFloat | None = None
    """10**9 bytes a second of the trainer's push; the transport's own where nothing is said."""
    pull_gb_s: PositiveFloat | None = None
    """Of one engine's pull."""
    latency_s: NonNegativeFloat | None = None
    device_gb_s: PositiveFloat = 25.0
    """From an engine's host memory into each of its devices, while it does not generate."""


class ClusterConfig(Config):
    """Hardware and workload of a simulation."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    model: str
    """Name in the catalogue of architectures (infra/models.py), or a directory in Hugging Face format."""
    pools: dict[PoolName, PoolSpec] = Field(min_length=1)
    rollout: Annotated[tuple[EnginesSpec, ...], Field(min_length=1)]
    train: TrainSpec
    environment: EnvironmentSpec
    reward: RewardSpec = Field(default_factory=RewardSpec)
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    affinity: dict[str, PoolName] | None = None
    """Rollout pool of each domain, `default` that of all others; {} lets every domain go anywhere. Left out:
    as the campaign says, in whose place it otherwise stands."""
    workload: dict[str, DomainWorkload] = Field(min_length=1)
    coefficients: str | None = None
    """A file of fitted coefficients, or the name of a committed calibration; empty takes the defaults."""

    @classmethod
    def load(cls, path: str | Path) -> "ClusterConfig":
        """Read a YAML file. Raises `ClusterError`."""
        try:
            data = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ClusterError(f"cannot read the cluster file: {error}") from None
        except yaml.YAMLError as error:
            raise ClusterError(f"{path} is not YAML: {error}") from None
        return cls.parse(data)

    @classmethod
    def parse(cls, data: Any) -> "ClusterConfig":
        """Validate plain data. Raises `ClusterError`."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [_describe(detail) for detail in error.errors()]
            raise ClusterError("the cluster cannot be simulated:\n" + "\n".join(lines)) from None

    def dump(self) -> str:
        """As YAML, every option written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def usd_per_hour(self) -> float:
        """Rent of all devices, whether they work or not; functions cost only what they work."""
        return sum(pool.devices * pool.price for pool in self.rented.values())

    @property
    def h20_per_hour(self) -> float:
        """The same in hours of an H20, by the catalogue's ratios of cost."""
        return sum(pool.devices * pool.entry.cost for pool in self.rented.values())

    @property
    def rented(self) -> dict[str, PoolSpec]:
        """Pools whose devices are paid for all the time."""
        return {name: pool for name, pool in self.pools.items() if pool.entry.kind != "serverless"}

    @property
    def devices_used(self) -> dict[str, int]:
        """Devices that engines, trainer and dedicated reward workers hold, by pool."""
        used: Counter[str] = Counter()
        for engines in self.rollout:
            used[engines.pool] += engines.devices
        if not self.train.colocated:
            used[self.train.pool] += self.train.devices
        if self.reward.kind == "dedicated" and self.reward.pool is not None:
            used[self.reward.pool] += self.reward.workers or 0
        return dict(used)

    @model_validator(mode="after")
    def _pools_exist(self) -> "ClusterConfig":
        named = {f"rollout.{index}.pool": engines.pool for index, engines in enumerate(self.rollout)}
        named |= {"train.pool": self.train.pool, "environment.pool": self.environment.pool}
        if self.reward.pool is not None:
            named["reward.pool"] = self.reward.pool
        for option, pool in named.items():
            if pool not in self.pools:
                raise ValueError(f"{option}: there is no pool {pool!r} in pools: {', '.join(self.pools)}")
        working = {option: pool for option, pool in named.items() if not option.startswith(("env", "rew"))}
        for option, pool in working.items():
            if self.pools[pool].entry.kind == "serverless":
                raise ValueError(f"{option}: {pool} are functions, which neither generate nor train")
        rollout = {engines.pool for engines in self.rollout}
        for domain, pool in (self.affinity or {}).items():
            if pool not in rollout:
                raise ValueError(f"affinity.{domain}: pool {pool!r} has no engines: {', '.join(rollout)}")
        return self

    @model_validator(mode="after")
    def _pools_have_the_devices(self) -> "ClusterConfig":
        for name, used in self.devices_used.items():
            if used > self.pools[name].devices:
                raise ValueError(
                    f"pools.{name}.devices ({self.pools[name].devices}) is below the {used} that rollout, "
                    "train and reward use of it: raise it, or give them fewer"
                )
        if self.train.colocated:
            shared = sum(each.devices for each in self.rollout if each.pool == self.train.pool)
            if shared < self.train.devices:
                raise ValueError(
                    f"train.devices ({self.train.devices}) is above the {shared} devices of rollout on pool "
                    f"{self.train.pool}, which train.colocated shares: lower it, or train on devices apart"
                )
        return self

    @model_validator(mode="after")
    def _roles_complete_one_another(self) -> "ClusterConfig":
        roles = {engines.role for engines in self.rollout}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ValueError(
                f"rollout has engines of role {' and '.join(sorted(roles))}: either all do both, or some "
                "prefill and the others decode"
            )
        return self


def _describe(detail: Any) -> str:
    option = ".".join(str(part) for part in detail["loc"]) or "cluster"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "there is no such option"
    elif detail["type"] not in ("value_error", "missing"):
        message = f"{message} (it is {detail['input']!r})"
    return f"  {option}: {message}"
