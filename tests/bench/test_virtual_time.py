from tests.bench.virtual_time import Customers, measure, waits_on_simpy, waits_on_virtual_time


def test_both_simulators_make_every_customer_wait_as_long() -> None:
    customers = Customers.draw(2_000)
    waits = waits_on_virtual_time(customers)
    assert waits == waits_on_simpy(customers)
    assert max(waits) > 0.0


def test_the_row_compares_events_of_one_and_the_same_model() -> None:
    row = measure(repeats=1, count=200)
    assert row.ratio == row.ours / row.reference
    assert row.ours > 0.0
