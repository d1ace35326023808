"""A what-if's answer in the Prefect dashboard. Keys are stable, so each has a history.

<campaign>-what-if           every candidate: what it is predicted to do, or why it was turned down
<campaign>-what-if-pareto    the candidates that none beats, cost beside speed
<campaign>-what-if-timeline  the stages of the best candidate's last steps
<campaign>-what-if-report    where the page is, with the plots
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from tasks.report.run_files import Span
from tasks.report.timeline import WAITING, by_lane, first_window
from tasks.simulation.what_if.answer import Answer, table
from tasks.simulation.what_if.prediction import Objective

WIDTH = 72
"""Characters of a timeline."""


async def show_answer(answer: Answer, spans: Sequence[Span], page: Path | None) -> None:
    """To be awaited inside the flow run, which then owns the artifacts."""
    prefix = f"{answer.campaign.lower().replace('_', '-')}-what-if"
    await acreate_table_artifact(
        table(answer.candidates),
        key=prefix,
        description=f"Predicted on cluster {answer.cluster}: the best first, those turned down last.",
    )
    await acreate_markdown_artifact(pareto_markdown(answer), key=f"{prefix}-pareto")
    if spans:
        await acreate_markdown_artifact(timeline_markdown(spans), key=f"{prefix}-timeline")
    if page is not None:
        await acreate_markdown_artifact(f"The answer, one HTML file:\n\n`{page}`\n", key=f"{prefix}-report")


def pareto_markdown(answer: Answer) -> str:
    """The front as bars: what each candidate costs and how quick it is."""
    throughput = answer.objective is Objective.THROUGHPUT
    front = [each for each in answer.candidates if each.on_front]
    if not front:
        return "No candidate can run within the limits.\n"
    places = []
    for each in front:
        assert each.prediction is not None
        cost, slowness = answer.objective.costs(each.prediction)
        places.append((each, cost, abs(slowness)))
    places.sort(key=lambda place: place[1])
    dearest, longest = max(cost for _, cost, _ in places), max(speed for *_, speed in places)
    units = ("USD a million tokens", "tokens a second") if throughput else ("USD a step", "seconds a step")
    lines = [["candidate", units[0], "", units[1], ""], ["---"] * 5]
    for each, cost, speed in places:
        name = f"**{each.label}**" if each.best else each.label
        lines.append([name, f"{cost:.4g}", _bar(cost, dearest), f"{speed:.4g}", _bar(speed, longest)])
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### Pareto front: {answer.campaign} on {answer.cluster}\n\n{rows}\n"


def timeline_markdown(spans: Sequence[Span]) -> str:
    """The last steps in characters: a lane a line, a letter a stage, dots where it waits or idles."""
    start, end = first_window(spans)
    width = (end - start) / WIDTH or 1.0
    letters: dict[str, str] = {}
    lanes = []
    for lane, members in by_lane(spans).items():
        cells = ["·"] * WIDTH
        for span in sorted(members, key=lambda span: span.start):
            if span.stage in WAITING or span.end < start or span.start > end:
                continue
            letter = letters.setdefault(span.stage, _letter(span.stage, letters.values()))
            first = max(int((span.start - start) / width), 0)
            last = min(max(int((span.end - start) / width), first + 1), WIDTH)
            cells[first:last] = letter * (last - first)
        lanes.append(f"{lane:<10} {''.join(cells)}")
    names = ", ".join(f"{letter} {stage}" for stage, letter in letters.items())
    scale = f"{'':<10} {start:<.4g} s{end:>{WIDTH - len(f'{start:<.4g} s') - 2}.4g} s"
    return "\n".join(["### Timeline of the best candidate", "", "```", *lanes, scale, "```", "", names, ""])


def _letter(stage: str, taken: Iterable[str]) -> str:
    used = set(taken)
    free = [letter for letter in stage.upper() if letter.isalpha() and letter not in used]
    return free[0] if free else "#"


def _bar(value: float, largest: float, width: int = 20) -> str:
    return "█" * round(width * value / largest) if largest > 0 else ""
