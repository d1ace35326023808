"""Binding a run's roles and domains to pools, at deployment: what the resource manager decides is carried out
here, kept in the run's folder, and said in the log.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.affinity import DEFAULT, Affinity, UnknownAffinity, declared_affinity
from infra.model_size import ModelSize, UnknownModel
from infra.resources import ANYWHERE, Binding, Pool, ResourceManager, preferred_pool
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign, CampaignError, PoolsConfig

logger = logging.getLogger(__name__)

ROLES = "pools."
DOMAINS = "domain:"
"""What the names of the subjects begin with that get a pool."""


@dataclass(frozen=True, slots=True)
class BoundAffinity:
    """What the proxy routes by."""

    pools: dict[str, str]  # by domain, "default" for others; a domain that is missing goes anywhere
    fall_backs: dict[str, list[str]]  # of each pool, those that may stand in for it, the nearest first


def requested_affinity(campaign: Campaign) -> Affinity:
    """What campaign and decorated method ask for. Raises `CampaignError` for what is not there.

    With domains but no default, the default is the rollout pool with the most bandwidth for its compute.
    """
    affinity = Affinity.of(campaign.affinity.domains)
    pools = campaign.rollout_pools
    if campaign.affinity.declared_by is not None:
        try:
            declared = declared_affinity(campaign.affinity.declared_by)
            declared.check(campaign.domains, pools, f"affinity.declared_by ({campaign.affinity.declared_by})")
        except UnknownAffinity as error:
            raise CampaignError(f"affinity.declared_by: {error}") from None
        affinity = declared.overridden(affinity)
    known = {name: entry for name, entry in pools.items() if entry is not None}
    if affinity and DEFAULT not in affinity and len(known) == len(pools):
        usual = preferred_pool("rollout", known)
        if usual is not None:
            affinity = affinity.overridden({DEFAULT: usual})
    return affinity


def model_size(campaign: Campaign, model: Path | None = None) -> ModelSize | None:
    """Of the campaign's model; None where its family is not known to `infra.model_size`.

    `model` is the prepared directory of a model that is built; before there is one, the size follows from
    `model.build`.
    """
    directory = model if campaign.model.path is None else Path(campaign.model.path)
    if directory is not None and (directory / "config.json").exists():
        try:
            return ModelSize.of(json.loads((directory / "config.json").read_text()))
        except UnknownModel:
            return None
    if campaign.model.path is not None:
        return None
    build = campaign.model.build
    return ModelSize.of(
        {
            "model_type": "llama",
            "num_hidden_layers": build.layers,
            "hidden_size": build.hidden_size,
            "intermediate_size": build.intermediate_size,
            "num_attention_heads": build.heads,
            "vocab_size": build.vocabulary,
            "tie_word_embeddings": True,
        }
    )


def bind_roles(
    campaign: Campaign, available: Mapping[str, bool], file: BindingsFile | None = None
) -> PoolsConfig:
    """The pools that serve the roles of a campaign on work pools, given which of these are available.

    Roles of pools that are not get a compatible one, with a warning. With `file`, a run's own bindings are
    kept and saved. Raises `infra.resources.NoCompatiblePool`.
    """
    pools = campaign.pools
    assert pools is not None
    size = model_size(campaign)
    weights, state = (size.weight_bytes, size.state_bytes) if size is not None else (0, 0)
    manager = ResourceManager.of(
        [
            Pool(name, pools.hardware_of(name), pools.devices.get(name, 1), available.get(name, False))
            for name in dict.fromkeys([*pools.names, *pools.hardware])
        ],
        file.bindings(ROLES) if file is not None else (),
    )
    before = dict(manager.bindings)
    wanted: dict[str, tuple[str, int]] = {
        **{f"{ROLES}rollout.{pool}": (pool, weights) for pool in pools.rollout},
        **{f"{ROLES}prefill.{pool}": (pool, weights) for pool in pools.prefill},
        f"{ROLES}train": (pools.train, state),
        f"{ROLES}environment": (pools.environment, 0),
        f"{ROLES}reward": (pools.reward, 0),
    }
    bound = {subject: manager.bind(subject, pool, memory) for subject, (pool, memory) in wanted.items()}
    manager.keep_only(wanted)
    _warn_of_moves(before, manager)
    if file is not None:
        file.save(ROLES, list(manager.bindings.values()))
    return pools.model_copy(
        update={
            "rollout": _pools(bound, f"{ROLES}rollout."),
            "prefill": _pools(bound, f"{ROLES}prefill."),
            "train": bound[f"{ROLES}train"].pool,
            "environment": bound[f"{ROLES}environment"].pool,
            "reward": bound[f"{ROLES}reward"].pool,
        }
    )


def domain_manager(campaign: Campaign, serving: tuple[str, ...], file: BindingsFile) -> ResourceManager:
    """The rollout pools of a run, of which `serving` have engines, with what its domains were bound to."""
    known = campaign.rollout_pools
    hardware_of = campaign.affinity.hardware_of if campaign.pools is None else campaign.pools.hardware_of
    devices = campaign.pools.devices if campaign.pools is not None else {}
    return ResourceManager.of(
        [
            Pool(name, hardware_of(name), devices.get(name, 1), name in serving)
            for name in dict.fromkeys([*known, *serving])
        ],
        file.bindings(DOMAINS),
    )


def bind_domains(campaign: Campaign, manager: ResourceManager, file: BindingsFile) -> BoundAffinity:
    """Bind every domain, and the default, to the rollout pool it asks for or to a compatible one; save that.

    A domain that asks for no pool goes anywhere, unless a profile has bound it in an earlier session. Raises
    `CampaignError` and `infra.resources.NoCompatiblePool`.
    """
    affinity = requested_affinity(campaign)
    before = dict(manager.bindings)
    subjects = {
        f"{DOMAINS}{domain}": affinity.pool_of(domain) or ANYWHERE for domain in [*campaign.domains, DEFAULT]
    }
    for subject, pool in subjects.items():
        manager.bind(subject, pool)
    manager.keep_only(subjects)
    _warn_of_moves(before, manager)
    file.save(DOMAINS, list(manager.bindings.values()))
    return bound_affinity(manager)


def bound_affinity(manager: ResourceManager) -> BoundAffinity:
    """What the manager's domains are bound to now."""
    pools = {
        subject.removeprefix(DOMAINS): binding.pool
        for subject, binding in manager.bindings.items()
        if binding.pool != ANYWHERE
    }
    return BoundAffinity(pools, {name: manager.fall_backs(name) for name in manager.pools})


def _pools(bound: Mapping[str, Binding], prefix: str) -> tuple[str, ...]:
    """Each once, in the campaign's order: two that fell back to one pool share it."""
    return tuple(dict.fromkeys(b.pool for subject, b in bound.items() if subject.startswith(prefix)))


def _warn_of_moves(before: Mapping[str, Binding], manager: ResourceManager) -> None:
    for subject, binding in manager.bindings.items():
        if binding.moved and before.get(subject) != binding:
            logger.warning("%s", binding.warning())
        elif binding.moved:
            logger.info("kept from the run's earlier session: %s", binding.warning())
