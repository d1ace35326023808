"""The answer to a what-if as one HTML file that holds all it shows and loads nothing."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from tasks.report import html as run_report
from tasks.report import timeline
from tasks.report.facts import duration
from tasks.report.figures import Figure
from tasks.report.run_files import Span, replace_file
from tasks.simulation.what_if import figures
from tasks.simulation.what_if.answer import COLUMNS, Answer, Candidate, table

SHOWN = 8
"""Candidates whose stages and pools are drawn: the best and the front."""


def write_what_if(
    path: Path, answer: Answer, spans: Sequence[Span] = (), files: dict[str, str] | None = None
) -> Path:
    """Write the page. `spans` are the best candidate's timeline; `files` are texts to show, by name."""
    replace_file(path, render_what_if(answer, spans, files))
    return path


def render_what_if(answer: Answer, spans: Sequence[Span] = (), files: dict[str, str] | None = None) -> str:
    shown = [each for each in answer.simulated if each.on_front or each.best][:SHOWN]
    plots: dict[str, Figure] = {}
    if len(answer.simulated) > 1:
        plots["pareto"] = figures.pareto(answer)
    if shown:
        plots["stages"] = figures.stages(shown)
        plots["utilisation"] = figures.utilisation(shown)
    best = answer.best
    if best is not None and best.prediction is not None and best.prediction.staleness:
        plots["staleness"] = figures.staleness(best.prediction)
    if spans:
        plots["timeline"] = timeline.timeline(spans)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, Path(run_report.__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("what_if.html.jinja").render(
        answer=answer,
        summary=_summary(answer),
        facts=_facts(best),
        columns=COLUMNS[:-1],
        lines=[(each, table([each])[0]) for each in answer.simulated],
        rejections=answer.rejections,
        figures=plots,
        files=files or {},
        plotly_js=get_plotlyjs(),
    )


def _summary(answer: Answer) -> list[str]:
    words = [f"cluster {answer.cluster}", f"{len(answer.simulated)} of {answer.size} candidates simulated"]
    limits = answer.limits
    if limits.usd_per_hour is not None:
        words.append(f"rent at most {limits.usd_per_hour:g} USD an hour")
    if limits.usd_per_step is not None:
        words.append(f"a step at most {limits.usd_per_step:g} USD")
    if limits.step_seconds is not None:
        words.append(f"a step at most {limits.step_seconds:g} s")
    return words


def _facts(best: Candidate | None) -> list[tuple[str, str]]:
    if best is None or best.prediction is None:
        return []
    found = best.prediction
    return [
        (
            "step",
            duration(found.step_seconds) if found.step_seconds >= 100 else f"{found.step_seconds:.3g} s",
        ),
        ("tokens a second", f"{found.tokens_per_s:,.0f}"),
        ("rent", f"{found.usd_per_hour:,.2f} USD/h"),
        ("a step costs", f"{found.usd_per_step:.3g} USD"),
        ("mean staleness", f"{found.staleness_mean:.2f}"),
        ("wasted tokens", f"{found.wasted_share:.1%}"),
        ("simulated in", f"{found.wall_seconds:.2g} s"),
    ]
