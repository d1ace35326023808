"""The worked pages of infra/deploy/serverless are configurations that work, and their images hold enough."""

import json
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tasks.campaign import Campaign
from tasks.reward.config import ServerlessConfig
from tasks.reward.lithops_service import ServerlessError, lithops_config

pytest.importorskip("lithops")

FOLDER = Path(__file__).parents[2] / "infra/deploy/serverless"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "README")


def blocks(page: str) -> list[dict[str, Any]]:
    """The YAML of a page: what goes into the campaign, and Lithops' file."""
    parts = (FOLDER / f"{page}.md").read_text().split("```yaml\n")[1:]
    return [yaml.safe_load(part.split("```")[0]) for part in parts]


def test_there_is_a_page_and_an_image_for_each_service() -> None:
    assert {"aliyun_fc", "aws_lambda", "knative", "k8s"} <= set(PAGES)
    assert {page.stem for page in FOLDER.glob("*.Dockerfile")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_campaign_is_one_and_its_lithops_file_is_accepted(page: str, tmp_path: Path) -> None:
    reward, lithops = blocks(page)
    file = tmp_path / "lithops.yaml"
    file.write_text(yaml.safe_dump(lithops))
    reward["reward"]["serverless"]["config_file"] = str(file)
    campaign = Campaign.parse({"name": "c", "domains": {"d": {"source": "gem"}}, **reward})
    config = campaign.reward.serverless
    assert isinstance(config, ServerlessConfig)
    assert config.backend == page
    assert lithops[page]["runtime_timeout"] > config.life_s
    try:
        complete = lithops_config(config, {})
    except ServerlessError as error:
        if "is not installed here" in str(error):
            pytest.skip(str(error))
        raise
    assert (complete["lithops"]["backend"], complete["lithops"]["storage"]) == (page, config.storage)


@pytest.mark.parametrize("page", PAGES)
def test_an_image_copies_what_an_activation_imports(page: str) -> None:
    lines = (FOLDER / f"{page}.Dockerfile").read_text().splitlines()
    assert {"COPY infra infra", "COPY blocks blocks", "COPY tasks tasks"} <= set(lines)
    assert f"COPY lithops_{'lambda' if page == 'aws_lambda' else page}.zip ." in lines


def distributions_of_the_image() -> set[str]:
    """requirements.txt and all that its lines require."""
    found: set[str] = set()
    queue = (FOLDER / "requirements.txt").read_text().splitlines()
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found.add(name)
        queue += distribution(name).requires or []
    return found


def test_an_activation_needs_nothing_that_its_image_lacks() -> None:
    image = distributions_of_the_image()
    absent = [
        name
        for name, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & (image | {"tutti"})
    ]
    modules = ["activation", "worker", "reasoning_gym", "verifiers.math", "verifiers.numeric"]
    code = "\n".join(
        [
            "import json, sys",
            "sys.modules.update({name: None for name in json.load(sys.stdin)})  # so that its import fails",
            *(f"import tasks.reward.{module}" for module in modules),
        ]
    )
    subprocess.run([sys.executable, "-c", code], input=json.dumps(absent), check=True, text=True)
    assert {"torch", "prefect", "distributed", "transformers"} <= set(absent)
