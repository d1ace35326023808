import threading

import pytest

from tasks.environment.config import DomainConfig
from tasks.reward.dispatch import RewardWorkers
from tasks.reward.functions import RewardInput
from tasks.trajectory import InfraError, Reward, Skip

pytest.importorskip("math_verify")

from math_verify import parse
from math_verify import verify as their_verify

from tasks.reward.verifiers.math import verify


def given(gold: object, *actions: str) -> RewardInput:
    return RewardInput("d", 1, "p", actions, ("",), (0.0,), "terminated", {"gold": gold})


def judged(gold: object, *actions: str) -> float | Skip:
    return verify(given(gold, *actions))


EQUAL = [
    (r"\boxed{e^{16}-1}", "-1 + exp(16)"),
    (r"$\sqrt{1/n}$", r"$\frac{1}{\sqrt n}$"),
    ("1,234", "1234"),
    (r"\frac12", "0.5"),
    (r"\pm 2021", r"$2021, -2021$"),
    ("0.5", r"50\%"),
    ("1/3", "0.333333"),
    ("0.000001", r"10^{-6}"),
    (r"\frac{\sqrt3}{3}", r"The answer is $\frac{1}{\sqrt{3}}$."),
    (r"\sqrt{5+2\sqrt6}", r"\boxed{\sqrt2+\sqrt3}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sin(2x)", r"$2\sin x\cos x$"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("5", "2+3=5"),
    ("y=2x", "$2y=4x$"),
    ("3x-y+13=0", "6x - 2y + 26 = 0"),
    ("x<2", "$2>x$"),
    ("x^2<4", "$-2<x<2$"),
    (r"\{1,2\}", r"$\{2,1\}$"),
    ("(1,2)", "$(1,2)$"),
    ("[0,1)", "$[0,1)$"),
    (r"(-\infty,2)\cup(3,\infty)", r"$x \in (-\infty,2)\cup(3,\infty)$"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}1\\ \frac{4}{2}\end{pmatrix}$"),
    (r"\text{Monday}", "The answer is Monday."),
    (r"\text{(B)}", r"\boxed{\text{B}}"),
    ("72", "The total is 72 clips, altogether."),
    ("42", "2+40=42\n#### 42\n" + "And so on and so forth. " * 60),
    ("2^{100}", "1267650600228229401496703205376"),
    (r"\sqrt{-4}", "2i"),
    ("3+4i", r"\boxed{4i+3}"),
    ("1500", "1.5e3"),
    ("5/2", "2 1/2"),
    ("-\\frac{5}{2}", "-2 1/2"),
    ("[3,\\infty)", "x >= 3"),
    ("10", r"\binom{5}{2}"),
    (r"9\pi", r"$A = \pi r^2 = 9\pi$"),
]


@pytest.mark.parametrize(("gold", "response"), EQUAL)
def test_equal(gold, response):
    assert judged(gold, response) == 1.0


DIFFERENT = [
    (r"\frac{1}{2^{99}}", r"$\frac{1}{2^{98}}$"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("$3*x-1*y+13=0$", "$3x + 4y + 14=0$"),
    ("(0,1)", "$(0,1.5)$"),
    ("5", "$2x+1=5$"),
    ("5", "2+2=5"),
    ("x=1", "$y=1$"),
    ("x<2", "$x>2$"),
    ("x<2", r"$x\le 2$"),
    ("[0,1]", "$[0,1)$"),
    ("0", "$10^{-20}$"),
    ("|x|", "$x$"),
    (r"\sqrt{x^2}", "$x$"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}2\\1\end{pmatrix}$"),
    (r"\text{Monday}", "The answer is Tuesday."),
    (r"\text{Monday}", "42"),
    ("42", "Monday"),
    ("(1,2)", "$(2,1)$"),
    (r"\{1,2\}", r"$\{1,2,3\}$"),
    ("2^{200}", "2^{200}+1"),
    ("0.00123456", "0.001235"),
    ("42", ""),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{\frac{}{}"),
]


@pytest.mark.parametrize(("gold", "response"), DIFFERENT)
def test_different(gold, response):
    assert judged(gold, response) == 0.0


SMALL = [(rf"\frac{{1}}{{2^{{{n}}}}}", rf"\frac{{1}}{{2^{{{n - 1}}}}}") for n in (10, 30, 60, 90, 300)]
SMALL += [(f"e^{{-{n}}}", f"e^{{-{n + 1}}}") for n in (5, 20, 40, 80, 400)]
SMALL += [(f"0.{'0' * n}1", f"0.{'0' * n}2") for n in (2, 5, 8, 20)]
SMALL += [(rf"\pi\cdot 10^{{-{n}}}", rf"3\cdot 10^{{-{n}}}") for n in (3, 16, 25)]
SMALL += [(rf"\frac{{x}}{{2^{{{n}}}}}", rf"\frac{{x}}{{2^{{{n + 1}}}}}") for n in (10, 99)]
LARGE = [(f"10^{{{n}}}+1", f"10^{{{n}}}") for n in (5, 20, 60)]
LARGE += [(rf"\sqrt{{10^{{{2 * n}}}+1}}", f"10^{{{n}}}") for n in (5, 15, 40)]
UNSOLVABLE = [(f"x^2+{a}=0", f"x^2+{a + 1}=0") for a in (1, 2, 7)]
UNSOLVABLE += [("x=x+1", "x=x+2"), ("x^2<0", "x^2<-1"), (r"e^x=0", r"e^x=-1"), ("|x|=-1", "|x|=-2")]
RIGHT_SIDES = [(str(n), f"{a}x+{b}={n}") for n, a, b in ((5, 2, 1), (7, 3, 2), (0, 3, 4), (-2, 1, 9))]
SEVERAL = [(f"{a}x+{b}y={c}", f"{a}x+{b + 1}y={c}") for a, b, c in ((1, 1, 1), (3, 2, 0), (5, 7, 2))]
SEVERAL += [(f"{a}*x+{b}*y+{c}=0", f"{a + 1}*x-{b}*y+{c + 2}=0") for a, b, c in ((1, 1, 1), (3, 2, 4))]


@pytest.mark.parametrize(("gold", "answer"), [*SMALL, *LARGE, *UNSOLVABLE, *RIGHT_SIDES, *SEVERAL])
@pytest.mark.parametrize("form", ["${}$", r"\boxed{{{}}}", "{}"])
def test_what_math_verify_takes_for_equal_by_kind(gold, answer, form):
    """Small absolute differences, no solutions on both sides, right sides, and equations not in LaTeX."""
    assert judged(gold, form.format(answer)) == 0.0
    assert judged(gold, form.format(gold)) == 1.0


def test_math_verify_itself_still_has_these_kinds():
    """If this fails, a newer Math-Verify may make `equivalence` smaller."""
    wrongly_equal = [SMALL[3], SMALL[12], UNSOLVABLE[0], RIGHT_SIDES[0]]
    for gold, answer in wrongly_equal:
        one, other = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
        assert their_verify(one, other, timeout_seconds=None)


@pytest.mark.parametrize("gold", [None, "", r"\frac{", r"\boxed{}", "}{", {"a": 1}])
def test_a_gold_answer_that_cannot_be_read_is_neither_right_nor_wrong(gold):
    assert isinstance(judged(gold, "42"), Skip)
    assert isinstance(judged(gold, str(gold)), Skip)


def test_it_needs_no_main_thread():
    """Math-Verify's own time limit raises off the main thread, and peers took that for a reward of 0."""
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.append(judged("42", r"\boxed{42}")))
    thread.start()
    thread.join()
    assert outcomes == [1.0]


@pytest.mark.slow
async def test_hostile_text_ends_in_its_process_and_leaves_as_many_workers():
    domains = {"d": DomainConfig(source="gem", reward="math", reward_limit_s=3.0)}
    workers = RewardWorkers(domains, 1, memory_mb=2048)
    await workers.start()
    try:
        assert await workers.score(given("42", r"\boxed{42}")) == Reward(1.0)
        for hostile in (r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^9)!}", r"$x^{2^{40}} + 1 = (x+1)^{2^{30}}$"):
            outcome = await workers.score(given("42", hostile))
            assert isinstance(outcome, InfraError) or outcome == Reward(0.0)
        assert await workers.score(given("42", r"\boxed{__import__('os').abort()}")) == Reward(0.0)
        assert await workers.score(given("42", r"\boxed{42}")) == Reward(1.0)
        assert isinstance(await workers.score(given(None, "42")), Skip)
        assert len(workers.pids) == 1
    finally:
        await workers.close()
