import math

from tasks.reward.mailbox import Report, Work, pack_order, pack_report, unpack_order, unpack_report
from tests.reward.test_reward_queue import work


def test_work_and_reports_survive_the_storage():
    fields = ["d", 3, "p", ["a"], ["o"], [0.5, math.inf], "terminated", {"k": [1, None], "b": b"x", "u": "é"}]
    order = [Work("k1", "m:f", fields, 2.5), work("k2")]
    assert unpack_order(pack_order(order)) == order
    report = Report("results", [("k1", ["reward", 0.5]), ("k2", ["skip", "no gold"])], 0.25, "t")
    assert unpack_report(pack_report(report)) == report


def test_an_object_that_is_still_being_written_is_not_there_yet():
    data = pack_report(Report("results", [("k1", ["reward", 0.5])]))
    for length in range(len(data)):
        assert unpack_report(data[:length]) is None
    data = pack_order([work("k")])
    for length in range(len(data)):
        assert unpack_order(data[:length]) is None
