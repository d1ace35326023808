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
