"""Binding roles and domains at deployment, and over restarts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from infra.affinity import hw_mapping
from infra.resources import NoCompatiblePool
from tasks.bindings import BindingsDamaged, BindingsFile
from tasks.campaign import Campaign, CampaignError
from tasks.rollout.affinity import (
    BoundAffinity,
    bind_domains,
    bind_roles,
    domain_manager,
    model_size,
    requested_affinity,
)
from tests.bench import small_llama

ROLES = {"rollout": ["h20", "h800"], "train": "h100", "environment": "cpu", "reward": "cpu"}


class Policy:
    @hw_mapping(hw_affinity={"web": "h800", "default": "h20"})
    def generate(self) -> None: ...

    @hw_mapping(hw_affinity={"web": "a100"})
    def elsewhere(self) -> None: ...


def campaign(
    affinity: dict[str, Any] | None = None, pools: dict[str, Any] | None = ROLES, **more: Any
) -> Campaign:
    return Campaign.parse(
        {
            "name": "bound",
            "domains": {name: {"source": "gem"} for name in ("math", "swe", "web")},
            "rollout": {"engine": {"kind": "torch", "workers": 2}},
            "pools": pools,
            "affinity": affinity or {},
            **more,
        }
    )


def on(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def bound(of: Campaign, folder: Path, *serving: str) -> BoundAffinity:
    """As a session that begins binds its domains."""
    file = BindingsFile(folder)
    return bind_domains(of, domain_manager(of, serving, file), file)


def test_declared_and_configured_pools_join_and_the_campaign_has_the_last_word() -> None:
    declared_by = f"{__name__}:Policy.generate"
    joined = requested_affinity(campaign({"declared_by": declared_by, "domains": {"math": "h800"}}))
    assert dict(joined) == {"web": "h800", "math": "h800", "default": "h20"}
    overridden = requested_affinity(campaign({"declared_by": declared_by, "domains": {"web": "h20"}}))
    assert overridden.pool_of("web") == "h20"


def test_a_declaration_with_a_pool_that_the_campaign_lacks_is_one_clear_error() -> None:
    with pytest.raises(CampaignError, match=r"affinity\.declared_by.*'a100' \(of 'web'\) is no rollout pool"):
        requested_affinity(campaign({"declared_by": f"{__name__}:Policy.elsewhere"}))


def test_with_domains_but_no_default_the_others_go_to_the_bandwidth_gpu() -> None:
    assert requested_affinity(campaign({"domains": {"swe": "h800"}})).pool_of("math") == "h20"
    assert len(requested_affinity(campaign())) == 0


def test_every_domain_is_bound_and_the_router_gets_the_compatible_pools(tmp_path: Path) -> None:
    given = bound(campaign({"domains": {"swe": "h800"}}), tmp_path, "h20", "h800")
    assert given.pools == {"math": "h20", "swe": "h800", "web": "h20", "default": "h20"}
    assert given.fall_backs["h800"] == ["h20"]
    assert bound(campaign(), tmp_path / "other", "h20", "h800").pools == {}


def test_a_domain_whose_pool_has_no_engine_falls_back_with_one_warning_and_keeps_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = campaign({"domains": {"swe": "h800", "default": "h20"}})
    assert bound(asked, tmp_path, "h20").pools["swe"] == "h20"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "domain:swe: pool 'h20' in the place of 'h800': 'h800' is not available"
    caplog.clear()
    assert bound(asked, tmp_path, "h20", "h800").pools["swe"] == "h20"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_changed_campaign_binds_anew_what_it_changed_and_forgets_what_it_dropped(tmp_path: Path) -> None:
    bound(campaign({"domains": {"swe": "h800", "default": "h20"}}), tmp_path, "h20")
    changed = campaign(
        {"domains": {"swe": "h800", "web": "h800", "default": "h20"}},
        domains={"swe": {"source": "gem"}, "web": {"source": "gem"}},
    )
    assert bound(changed, tmp_path, "h20", "h800").pools == {"swe": "h20", "web": "h800", "default": "h20"}
    subjects = [entry["subject"] for entry in json.loads(BindingsFile(tmp_path).path.read_text())["bindings"]]
    assert subjects == ["domain:swe", "domain:web", "domain:default"]


def test_roles_keep_the_pools_that_are_there() -> None:
    asked = campaign()
    assert bind_roles(asked, on("h20", "h800", "h100", "cpu")) == asked.pools


def test_a_role_falls_back_to_the_nearest_pool_even_a_spare_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = campaign(pools={**ROLES, "hardware": {"spare": "H200"}})
    given = bind_roles(asked, on("h20", "spare", "cpu"), BindingsFile(tmp_path))
    assert (given.rollout, given.train) == (("h20", "spare"), "spare")
    assert sorted(record.getMessage() for record in caplog.records) == [
        "pools.rollout.h800: pool 'spare' in the place of 'h800': 'h800' is not available",
        "pools.train: pool 'spare' in the place of 'h100': 'h100' is not available",
    ]
    again = bind_roles(asked, on("h20", "h800", "h100", "spare", "cpu"), BindingsFile(tmp_path))
    assert (again.rollout, again.train) == (("h20", "spare"), "spare")


def test_two_rollout_pools_that_fall_back_to_one_share_it() -> None:
    assert bind_roles(campaign(), on("h20", "h100", "cpu")).rollout == ("h20", "h100")
    assert bind_roles(campaign(pools={**ROLES, "train": "h20"}), on("h20", "cpu")).rollout == ("h20",)


def test_memory_for_training_counts_over_all_devices_of_a_pool(tmp_path: Path) -> None:
    big = {"hidden_size": 4096, "intermediate_size": 16384, "layers": 24, "heads": 32, "vocabulary": 65536}
    # 6.7e9 parameters: 121 GB of training state, of which 0.9 x 96 GB hold nothing, and two devices do.
    asked = {**ROLES, "rollout": "h20", "train": "h800"}
    model = {"build": {**big, "max_context": 8192}}
    workers = {"engine": {"kind": "torch", "workers": 1}}
    with pytest.raises(NoCompatiblePool, match=r"'h20' has 86\.4 GB for a model of"):
        bind_roles(
            campaign(pools={**asked, "environment": "h20", "reward": "h20"}, model=model, rollout=workers),
            on("h20"),
        )
    two = campaign(pools={**asked, "devices": {"h20": 2}}, model=model, rollout=workers)
    assert bind_roles(two, on("h20", "cpu")).train == "h20"


def test_the_size_of_a_model_is_read_from_its_directory_or_worked_out(tmp_path: Path) -> None:
    small_llama.build(tmp_path)
    given = model_size(campaign(model={"path": str(tmp_path)}))
    assert given is not None
    assert given.parameters == 2_233_152
    built = model_size(
        campaign(model={"build": {"vocabulary": 100, "hidden_size": 8, "intermediate_size": 16}})
    )
    assert built is not None
    # 100 x 8 tied embeddings, 2 layers of 4 x 8 x 8 + 3 x 8 x 16 + 2 x 8, and a norm of 8
    assert built.parameters == 800 + 2 * (256 + 384 + 16) + 8


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bindings.json").write_text("{")
    with pytest.raises(BindingsDamaged, match="remove it"):
        BindingsFile(tmp_path).read()
