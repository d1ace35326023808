"""Whether a campaign fits a cluster, and the performance models of its parts. Pure; nothing is started."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from infra.model_size import ModelSize, UnknownModel
from infra.models import model_of
from infra.performance.calibrated import Calibration
from infra.performance.coefficients import coefficients_of
from infra.performance.host_costs import HostCosts
from infra.performance.iteration import IterationModel
from infra.performance.parallel import ModelDoesNotFit
from infra.performance.training import TrainingModel, training_coefficients_of, training_parallel
from tasks.campaign import Campaign, StoresConfig, SupervisionConfig
from tasks.reward.config import RewardConfig
from tasks.rollout.affinity_config import AffinityConfig
from tasks.rollout.config import VllmEngineConfig
from tasks.simulation.cluster import ClusterConfig, ClusterError, EnginesSpec
from tasks.train.modes import MODES

RARE_S = 4e9
"""Heart-beats and signs of life of a simulation are so far apart that it has none: nothing can freeze."""
_UNBOUNDED = 1_000_000_000
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine. Engines of one spec share their timing."""

    spec: EnginesSpec
    timing: IterationModel
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """A campaign on a cluster."""

    campaign: Campaign
    """With as many engines and places as the cluster has, on its pools."""
    cluster: ClusterConfig
    size: ModelSize
    engines: tuple[EnginePlan, ...]
    """As the fleet numbers them: those that prefill first."""
    training: TrainingModel
    max_context: int
    host: HostCosts | None = None
    """Where the calibration is of one machine whose cores everything shares."""

    def pools(self, prefill: bool) -> tuple[str, ...]:
        """The pool of each engine that only prefills, or of each other one, in order."""
        return tuple(
            plan.spec.pool for plan in self.engines if (plan.spec.role == "prefill") is prefill
        ) or tuple(plan.spec.pool for plan in self.engines)


def fit(campaign: Campaign, cluster: ClusterConfig) -> Fitted:
    """Raises `ClusterError`, with a line for each option that is in the way."""
    problems = _mismatches(campaign, cluster)
    max_context = max(domain.max_tokens for domain in campaign.domains.values())

    def built(option: str, build: Callable[[], Built]) -> Built | None:
        try:
            return build()
        except (ModelDoesNotFit, UnknownModel, ValueError) as error:
            problems.append(f"{option}: {error}")
            return None

    size = built("model", lambda: model_of(cluster.model))
    calibration = built("coefficients", lambda: _calibration(cluster))
    if size is None or calibration is None:
        raise _refusal(cluster, problems)
    plans: list[EnginePlan] = []
    for index, spec in enumerate(cluster.rollout):
        plan = built(f"rollout.{index}", partial(_engine, size, cluster, spec, max_context, calibration))
        if plan is not None:
            plans += [plan] * spec.engines
    training = built("train", lambda: _training(size, campaign, cluster, max_context, calibration))
    if problems or training is None:
        raise _refusal(cluster, problems)
    plans.sort(key=lambda plan: plan.spec.role != "prefill")
    return Fitted(
        _on_cluster(campaign, cluster, plans),
        cluster,
        size,
        tuple(plans),
        training,
        max_context,
        calibration.host,
    )


def _refusal(cluster: ClusterConfig, problems: list[str]) -> ClusterError:
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ClusterError(f"the campaign cannot run on cluster {cluster.name}:\n{lines}")


def _calibration(cluster: ClusterConfig) -> Calibration:
    """Empty where the cluster names none. Raises ValueError."""
    if cluster.coefficients is None:
        return Calibration(name="defaults", fitted_on="", hardware={})
    return Calibration.named(cluster.coefficients)


def _engine(
    size: ModelSize,
    cluster: ClusterConfig,
    spec: EnginesSpec,
    max_context: int,
    calibration: Calibration,
) -> EnginePlan:
    pool = cluster.pools[spec.pool]
    parallel = replace(spec.parallel, node=pool.devices_per_node)
    timing = IterationModel(size, pool.entry, parallel, coefficients_of(pool.entry, calibration))
    kv_tokens = timing.kv_tokens(spec.memory_utilization)
    if kv_tokens // spec.data_parallel < max_context:
        raise ModelDoesNotFit(
            f"an engine holds the KV of {kv_tokens // spec.data_parallel} tokens, and a trajectory may have "
            f"{max_context} (domains.*.max_tokens): give it more devices, or lower max_tokens"
        )
    return EnginePlan(spec, timing, kv_tokens)


def _training(
    size: ModelSize,
    campaign: Campaign,
    cluster: ClusterConfig,
    max_context: int,
    calibration: Calibration,
) -> TrainingModel:
    spec = cluster.train
    hardware = cluster.pools[spec.pool].entry
    kernels = coefficients_of(hardware, calibration)
    coefficients = training_coefficients_of(hardware, calibration)
    if "micro_batch_tokens" not in calibration.of(hardware.name).training:
        tokens = campaign.train.trainer.micro_batch_tokens
        coefficients = replace(coefficients, micro_batch_tokens=tokens)
    parallel = training_parallel(
        size,
        hardware,
        spec.devices,
        max_context,
        campaign.train.groups * campaign.train.group_size,
        coefficients,
        kernels=kernels,
        tensor=spec.tensor_parallel,
        pipeline=spec.pipeline_parallel,
        expert=spec.expert_parallel,
        node=cluster.pools[spec.pool].devices_per_node,
    )
    return TrainingModel(size, hardware, parallel, coefficients, kernels)


def _mismatches(campaign: Campaign, cluster: ClusterConfig) -> list[str]:
    problems = []
    missing = [domain for domain in campaign.domains if domain not in cluster.workload]
    if missing:
        problems.append(
            f"workload: it has no domain {', '.join(missing)}, which the campaign trains on; it has "
            f"{', '.join(cluster.workload)}"
        )
    mode = MODES[campaign.train.mode]
    if cluster.train.colocated and mode.overlaps_training:
        problems.append(
            f"train.colocated: mode {mode.name} trains while engines generate, so it needs "
            f"{cluster.train.devices} devices for the trainer alone: set colocated to false, with a pool "
            "that has them, or take mode sync or sync_plus"
        )
    batch = campaign.train.groups * campaign.train.group_size
    places = cluster.environment.places
    if mode.lockstep and places is not None and places < batch:
        problems.append(
            f"environment.places ({places}) is below the {batch} trajectories of a batch, which mode "
            f"{mode.name} runs in lockstep: raise it, or take mode sync_plus"
        )
    pools = {spec.pool for spec in cluster.rollout}
    for domain, pool in _affinity(campaign, cluster).items():
        if pool not in pools:
            problems.append(
                f"affinity: the campaign's domain {domain} prefers pool {pool}, which has no engines here; "
                f"there are {', '.join(sorted(pools))}: write `affinity` in the cluster file"
            )
    return problems


def _affinity(campaign: Campaign, cluster: ClusterConfig) -> dict[str, str]:
    return dict(campaign.affinity.domains if cluster.affinity is None else cluster.affinity)


def _on_cluster(campaign: Campaign, cluster: ClusterConfig, plans: list[EnginePlan]) -> Campaign:
    """The campaign with what the cluster decides. Supervision is as good as off: nothing here can freeze."""
    first = plans[0].spec
    rollout = campaign.rollout.model_copy(
        update={
            "engine": VllmEngineConfig(
                kind="vllm",
                workers=len(plans),
                prefill_workers=sum(plan.spec.role == "prefill" for plan in plans),
                min_prefill_tokens=campaign.rollout.min_prefill_tokens,
                max_running=max(plan.spec.max_running for plan in plans),
                max_batch_tokens=first.max_batch_tokens,
                tensor_parallel=first.tensor_parallel,
            ),
            "heartbeat_limit_s": RARE_S,
        }
    )
    affinity = AffinityConfig(
        **{
            **campaign.affinity.model_dump(),
            "domains": _affinity(campaign, cluster),
            "declared_by": campaign.affinity.declared_by if cluster.affinity is None else None,
            "local_pools": {plan.spec.pool: cluster.pools[plan.spec.pool].hardware for plan in plans},
        }
    )
    environment = campaign.environment.model_copy(
        update={"scheduler": None, "concurrent_trajectories": cluster.environment.places or _UNBOUNDED}
    )
    return campaign.model_copy(
        update={
            "rollout": rollout,
            "affinity": affinity,
            "environment": environment,
            "pools": None,
            "reward": RewardConfig(),
            "stores": StoresConfig(),
            "supervision": SupervisionConfig(every_s=RARE_S, silence_limit_s=RARE_S),
        }
    )
