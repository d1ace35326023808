from hypothesis import given
from hypothesis import strategies as st

from tasks.vital_signs import VitalSigns


def test_a_part_is_lost_after_a_limit_of_tries_that_all_failed() -> None:
    signs = VitalSigns(every_s=5, limit_s=15)
    for _ in range(2):
        signs.unheard()
        assert not signs.lost
    signs.unheard()
    assert signs.lost


def test_one_sign_of_life_begins_the_count_anew() -> None:
    signs = VitalSigns(every_s=5, limit_s=10)
    for _ in range(5):
        signs.unheard()
        signs.heard()
    signs.unheard()
    assert not signs.lost


def test_a_limit_that_is_no_multiple_is_rounded_up_and_never_nothing() -> None:
    signs = VitalSigns(every_s=5, limit_s=6)
    signs.unheard()
    assert not signs.lost
    signs.unheard()
    assert signs.lost
    assert not VitalSigns(every_s=5, limit_s=0.1).lost


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6))
def test_it_is_lost_exactly_when_the_last_tries_all_failed(heard: list[bool], allowed: int) -> None:
    signs = VitalSigns(every_s=1, limit_s=allowed)
    for one in heard:
        signs.heard() if one else signs.unheard()
    assert signs.lost == (len(heard) >= allowed and not any(heard[-allowed:]))
