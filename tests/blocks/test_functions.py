"""The saved function service: its sections whole, its secrets hidden, and named by a campaign."""

import sys

import pytest
from prefect.testing.utilities import prefect_test_harness

from blocks.functions import FunctionsBlock
from tasks.reward.config import ServerlessConfig
from tasks.reward.serverless import ServerlessTraits
from tasks.reward.serverless_dispatch import ServerlessRewards
from tasks.trajectory import Reward

SECTIONS = {"aws": {"region": "eu-west-1"}, "localhost": {"runtime": "/absent/python"}}
SECRETS = {"aws": {"secret_access_key": "hunter2"}, "redis": {"password": "hunter3"}}


def test_secrets_come_over_the_sections_and_do_not_show() -> None:
    block = FunctionsBlock(sections=SECTIONS, credentials=SECRETS)
    assert block.open() == {
        "aws": {"region": "eu-west-1", "secret_access_key": "hunter2"},
        "localhost": {"runtime": "/absent/python"},
        "redis": {"password": "hunter3"},
    }
    assert block.sections == SECTIONS
    assert "hunter" not in repr(block)
    assert "hunter" not in block.model_dump_json()
    assert FunctionsBlock().open() == {}


@pytest.mark.slow
async def test_a_campaign_names_a_saved_block_and_can_override_it() -> None:
    pytest.importorskip("lithops")
    function = "tests.reward.judgements:obey_remotely"
    fields = ["d", 3, "p", ["2"], ["o"], [0.0], "terminated", {}]
    with prefect_test_harness(server_startup_timeout=120):
        await FunctionsBlock(sections=SECTIONS, credentials=SECRETS).save("team")
        outcomes = []
        for config in ({}, {"localhost": {"runtime": sys.executable}}):
            options = ServerlessConfig(
                backend="localhost", block="team", config=config, retries=0, warm_workers=0
            )
            rewards = ServerlessRewards(options, {function: ServerlessTraits()})
            await rewards.start()
            outcomes.append(await rewards.score(function, fields, 10.0))
            await rewards.close()
    assert "/absent/python" in str(outcomes[0])
    assert outcomes[1] == Reward(2.0)
