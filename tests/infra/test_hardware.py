import pytest

from infra.hardware import CATALOGUE, UnknownHardware, hardware


def test_h20_and_h800_are_those_of_the_papers_table_2() -> None:
    h20, h800 = hardware("h20"), hardware("h800")
    assert (h20.tflops, h20.memory_gb, h20.bandwidth_tb_s, h20.cost) == (148, 96, 4.0, 1)
    assert (h800.tflops, h800.memory_gb, h800.bandwidth_tb_s, h800.cost) == (989.5, 80, 3.35, 2.85)
    assert h20.ridge == pytest.approx(37.0)
    assert h800.ridge == pytest.approx(295.37, abs=0.01)


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "RTX_4090"])
def test_a_name_may_be_written_as_people_write_it(name: str) -> None:
    assert hardware(name) is CATALOGUE["rtx4090"]


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UnknownHardware, match=r"'H801'.*h20, h800"):
        hardware("H801")


def test_every_entry_has_a_source_and_figures_that_can_be() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.source.startswith("[")
        assert min(entry.tflops, entry.memory_gb, entry.bandwidth_tb_s, entry.cost) > 0
        assert "[" in entry.link_source
        assert min(entry.usd_hour, entry.link_gb_s, entry.network_gb_s) > 0


def test_rents_and_costs_say_the_same_within_rounding():
    for entry in CATALOGUE.values():
        assert entry.usd_hour / hardware("h20").usd_hour == pytest.approx(entry.cost, rel=0.01, abs=0.005)


def test_links_of_the_papers_devices_are_half_of_what_they_have_both_ways():
    """RollArt's Table 2: NVLink 900 and 400 GB/s."""
    assert (hardware("h20").link_gb_s, hardware("h800").link_gb_s) == (450, 200)


def test_an_engine_counts_the_memory_that_the_driver_reports():
    assert hardware("rtx4090").usable_bytes == 25_250_758_656  # torch reports 25 250 627 584 of it
    assert hardware("cpu").usable_bytes == hardware("cpu").memory_bytes == 512e9
    for entry in CATALOGUE.values():
        assert 0.9 < entry.usable_bytes / entry.memory_bytes < 1.1
