from typing import Any

from tasks.bindings import BindingsRecord
from tasks.report.affinity_table import BoundLine, affinity_markdown, affinity_section

ADVICE: dict[str, Any] = {
    "step": 7,
    "bound": {"math": "wide"},
    "mapping": {"math": "wide", "web": "fast"},
    "makespan_s": 12.5,
    "current_s": 25.0,
    "gain": 0.5,
    "reasons": {"math": "math: 90% decode", "web": "web: 93% prefill | 40 turns"},
    "rows": [
        {
            "domain": "web",
            "pool": "wide",
            "hardware": "h20",
            "turns": 40.0,
            "prefilled": 7400.4,
            "decoded": 600.0,
            "prefill_s": 1.704,
            "decode_s": 0.2568,
        },
        {
            "domain": "web",
            "pool": "small",
            "hardware": "rtx4090",
            "turns": 40.0,
            "prefilled": 7400.4,
            "decoded": 600.0,
            "prefill_s": None,
            "decode_s": None,
        },
    ],
}


def test_the_page_says_what_is_bound_what_is_advised_and_why() -> None:
    lines = affinity_markdown(ADVICE, []).splitlines()
    assert lines[0].startswith(
        "**Step 7**: a step's trajectories take 12.5 s of generation as recommended, 25 s"
    )
    assert "(50% less)" in lines[0]
    assert "| math | wide | wide | math: 90% decode |" in lines
    assert "| web | any pool | fast | web: 93% prefill \\| 40 turns |" in lines
    assert "| web | wide | h20 | 40.0 | 7400 | 600 | 1.7 s | 257 ms |" in lines
    assert "| web | small | rtx4090 | 40.0 | 7400 | 600 | does not fit | does not fit |" in lines
    assert "Re-bound" not in "".join(lines)


def test_what_was_rebound_is_listed() -> None:
    page = affinity_markdown(ADVICE, [{"step": 3, "mapping": {"math": "wide", "web": "fast"}, "reasons": []}])
    assert "- from step 3: math on wide, web on fast" in page


def record(**fields: Any) -> BindingsRecord:
    bindings = [
        {"subject": "domain:web", "requested": "wide", "pool": "fast", "reason": "93% prefill"},
        {"subject": "domain:math", "requested": "*", "pool": "*", "reason": ""},
    ]
    return BindingsRecord.model_validate({"bindings": bindings, **fields})


def test_the_report_lists_what_is_bound_and_says_what_the_profile_did() -> None:
    section = affinity_section(record(advice=ADVICE, changes=[{"step": 3, "mapping": {}, "reasons": []}]))
    assert section is not None
    assert section.lines == [
        BoundLine("domain:web", "wide", "fast", "93% prefill"),
        BoundLine("domain:math", "any pool", "any pool", "math: 90% decode"),
    ]
    assert "re-bound new trajectories after step 3" in section.summary
    assert "After step 7 it advises math on wide, web on fast: 50% less" in section.summary


def test_a_run_that_binds_nothing_has_no_such_section() -> None:
    assert affinity_section(BindingsRecord()) is None
    assert affinity_section(record(bindings=[])) is None
