from tasks.report.evaluation_table import evaluation_table, format_evaluation

LOW = {"mean": 0.1, "low": 0.05, "high": 0.2, "episodes": 50}
HIGH = {"mean": 0.8, "low": 0.7, "high": 0.9, "episodes": 48}
NOTHING = {"mean": None, "low": 0.0, "high": 1.0, "episodes": 0}
EVALUATION = {
    "rows": [
        {"domain": "game", "untrained": LOW, "trained": HIGH, "separated": True},
        {"domain": "math", "untrained": HIGH, "trained": LOW, "separated": True},
        {"domain": "web", "untrained": LOW, "trained": NOTHING, "separated": False},
        {"domain": "code", "untrained": LOW, "trained": None, "separated": False},
    ]
}


def test_says_better_or_worse_only_where_intervals_are_apart():
    lines = evaluation_table(EVALUATION)
    assert [line["intervals"] for line in lines] == ["apart: better", "apart: worse", "overlap", "-"]
    assert lines[0]["trained"] == "0.800 [0.700, 0.900]"
    assert lines[2]["trained"] == "no episode [0.000, 1.000]"
    assert [line["episodes"] for line in lines] == [48, 50, 0, 50]


def test_columns_are_aligned():
    lines = format_evaluation(EVALUATION).splitlines()
    assert lines[0] == "domain  untrained             trained                    episodes  intervals"
    assert lines[1] == "game    0.100 [0.050, 0.200]  0.800 [0.700, 0.900]       48        apart: better"
    assert len(lines) == 5


def test_of_no_evaluation_only_the_header_is_left():
    assert format_evaluation({}).splitlines() == ["domain  untrained  trained  episodes  intervals"]
