"""What a campaign would do on a cluster, and which candidate of several is best: simulated, not run.

python -m flows.simulate flows/campaigns/laptop.yaml flows/clusters/laptop.yaml
python -m flows.simulate my.yaml cluster.yaml --vary train.alpha=1,2,4 --budget 400/hour
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError

from flows.results import JSON
from tasks.campaign import Campaign
from tasks.report.html import write_report
from tasks.report.run_files import RunFiles, Span, replace_file
from tasks.simulation.calibration.profile import workload_of_run
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.what_if.answer import Answer, format_table
from tasks.simulation.what_if.artifacts import show_answer
from tasks.simulation.what_if.candidates import changed
from tasks.simulation.what_if.prediction import Objective, Prediction
from tasks.simulation.what_if.question import NoCandidate, Question, WhatIf
from tasks.simulation.what_if.report import write_what_if
from tasks.simulation.what_if.simulations import Simulations

SEVERAL = 8
"""Simulations from which a process for each core pays: one takes seconds to start."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="simulate {label}")
async def simulate_candidate(
    label: str,
    simulations: Simulations,
    campaign: Campaign,
    cluster: ClusterConfig,
    what_if: WhatIf,
    folder: Path | None = None,
) -> Prediction | str:
    """What one candidate is predicted to do, or why it cannot run."""
    return await simulations.run(campaign, cluster, what_if.steps, what_if.warm_up_steps, folder)


@flow(name="simulate", log_prints=True, persist_result=False, result_serializer=JSON)
async def simulate(
    campaign: Campaign,
    cluster: ClusterConfig,
    what_if: WhatIf | None = None,
    folder: str | None = None,
    processes: int | None = None,
) -> dict[str, Any]:
    """Simulate a campaign on a cluster; with `what_if.vary`, find the best of the candidates.

    The answer is in `folder` (by default in the campaign's `stores.runs`): `answer.json`, `what_if.html`, and
    in `best/` what the best candidate's run would leave, with its own report. It is returned as plain data.
    Raises `VaryError` for an option that no candidate can have, `NoCandidate` where none can run.
    """
    asked = what_if or WhatIf()
    question = Question(campaign, cluster, asked)
    question.require()
    search = question.search()
    out = _answer_folder(campaign, cluster, folder)
    count = processes or (os.cpu_count() or 1 if search.space.size >= SEVERAL else 1)
    with Simulations(count) as simulations:
        while points := search.ask():
            found = await asyncio.gather(
                *(
                    simulate_candidate(
                        search.space.label(point) or campaign.name,
                        simulations,
                        *question.candidate(point),
                        asked,
                    )
                    for point in points
                )
            )
            for point, prediction in zip(points, found, strict=True):
                search.tell(point, prediction)
            print(f"{len(search.predictions)} of {search.space.size} candidates simulated")
        answer = Answer.of(search, campaign.name, cluster.name)
        if not answer.simulated:
            raise NoCandidate.of(answer.rejections)
        best = search.best()
        spans: Sequence[Span] = ()
        files = {"campaign": campaign.dump(), "cluster": cluster.dump()}
        if best is not None:
            chosen = question.candidate(best)
            files = {"campaign of the best": chosen[0].dump(), "cluster of the best": chosen[1].dump()}
            shutil.rmtree(out / "best", ignore_errors=True)
            await simulate_candidate("the best", simulations, *chosen, asked, out / "best")
            spans = RunFiles(out / "best").read_spans()
            await asyncio.to_thread(write_report, out / "best")
    page = await asyncio.to_thread(write_what_if, out / "what_if.html", answer, spans, files)
    plain = answer.plain()
    replace_file(out / "answer.json", json.dumps(plain, indent=2, allow_nan=False))
    if campaign.trackers.prefect_artifacts:
        await show_answer(answer, spans, page)
    print(f"\n{format_table(answer.simulated)}\n")
    for problem, count in answer.rejections.items():
        print(f"turned down, {count}: {problem}")
    print(f"best: {answer.best.label if answer.best else 'none keeps the limits'}; answer and plots: {page}")
    return plain


def _answer_folder(campaign: Campaign, cluster: ClusterConfig, folder: str | None) -> Path:
    default = Path(campaign.stores.runs) / "what-if" / f"{campaign.name}-{cluster.name}"
    return Path(folder or default).resolve()


def budget(text: str) -> dict[str, float]:
    """`400/hour` or `2.5/step` as an option of `WhatIf`. Raises ValueError."""
    amount, _, per = text.partition("/")
    option = {"hour": "usd_per_hour", "h": "usd_per_hour", "step": "usd_per_step"}.get(per)
    if option is None:
        raise ValueError(f"{text!r} is no budget: write USD as 400/hour or 2.5/step")
    return {option: float(amount)}


def with_workload_of(cluster: ClusterConfig, run: str) -> ClusterConfig:
    """The cluster with the domains of a real run as that run's trajectories were. Raises `TraceError`."""
    measured = workload_of_run(Path(run))
    return cluster.model_copy(update={"workload": {**cluster.workload, **measured}})


def loaded(campaign: str, cluster: str, overrides: Sequence[str]) -> tuple[Campaign, ClusterConfig]:
    """Both files, with `option=value` of the campaign or, with `cluster.` before it, of the cluster file.

    Raises `CampaignError` or `ClusterError`.
    """
    of_cluster = [override for override in overrides if override.startswith("cluster.")]
    of_campaign = [override for override in overrides if override not in of_cluster]
    campaign_read, cluster_read = Campaign.load(campaign, of_campaign), ClusterConfig.load(cluster)
    if of_cluster:
        axes = WhatIf(vary=tuple(of_cluster)).space
        _, data = changed({}, cluster_read.model_dump(mode="json"), axes.changes(axes.at(0)))
        cluster_read = ClusterConfig.parse(data)
    return campaign_read, cluster_read


def _question_of(given: argparse.Namespace) -> tuple[Campaign, ClusterConfig, WhatIf]:
    """What was asked for, checked before Prefect's server starts. Raises ValueError that says why not."""
    campaign, cluster = loaded(given.campaign, given.cluster, given.overrides)
    if given.workload_from is not None:
        cluster = with_workload_of(cluster, given.workload_from)
    limits = {key: value for text in given.budget for key, value in budget(text).items()}
    what_if = WhatIf(
        vary=tuple(given.vary),
        step_seconds=given.step_seconds,
        objective=Objective(given.objective),
        usd_per_hour=limits.get("usd_per_hour"),
        usd_per_step=limits.get("usd_per_step"),
        most=given.most,
        steps=given.steps,
        warm_up_steps=given.warm_up_steps,
    )
    Question(campaign, cluster, what_if).require()
    return campaign, cluster, what_if


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 2 for what cannot be simulated, 1 where no candidate keeps the limits."""
    parser = argparse.ArgumentParser(description="Simulate a campaign on a cluster.")
    parser.add_argument("campaign", help="campaign file, as for training")
    parser.add_argument("cluster", help="cluster file: hardware and workload")
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", help="cluster.OPTION of the cluster file"
    )
    parser.add_argument(
        "--workload-from", metavar="RUN", help="folder of a run whose trajectories are the work"
    )
    parser.add_argument(
        "--vary", action="append", default=[], metavar="option=v,v", help="may be given several times"
    )
    parser.add_argument("--budget", action="append", default=[], metavar="USD/hour|USD/step")
    parser.add_argument("--max-step-seconds", type=float, dest="step_seconds", metavar="S")
    parser.add_argument("--objective", choices=[each.value for each in Objective], default="step-time")
    parser.add_argument("--most", type=int, default=64, help="candidates simulated at most")
    parser.add_argument("--steps", type=int, default=5, help="train steps of each")
    parser.add_argument("--warm-up-steps", type=int, help="before these; by default alpha + 1")
    parser.add_argument("--processes", type=int, help="at a time; by default a core each")
    parser.add_argument("--out", help="folder of the answer")
    given = parser.parse_intermixed_args(arguments)
    try:
        campaign, cluster, what_if = _question_of(given)
    except ValidationError as error:
        for detail in error.errors():
            print(detail["msg"].removeprefix("Value error, "), file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        answer = asyncio.run(simulate(campaign, cluster, what_if, given.out, given.processes))
    except NoCandidate as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if any(each["best"] for each in answer["candidates"]) else 1


if __name__ == "__main__":
    sys.exit(main())
