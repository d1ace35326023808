"""A campaign file as the parameter of a deployment: a step of prefect.yaml."""

from typing import Any

from tasks.campaign import Campaign


def campaign_file(file: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The step's output: `campaign`, as Prefect's form shows it, every option written out.

    `overrides` are `dotted.option=value`. Raises `CampaignError`.
    """
    return {"campaign": Campaign.load(file, overrides).model_dump(mode="json")}
