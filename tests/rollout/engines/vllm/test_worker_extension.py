from pathlib import Path

from tasks.rollout.engines.vllm.worker_extension import checkpoint_shapes, faults
from tests.rollout.engines.vllm.policies import policy

EXPECTED = {"a": (2, 3), "b": (4,)}


def test_the_same_names_and_shapes_fit_in_any_order() -> None:
    assert faults({"b": (4,), "a": (2, 3)}, EXPECTED, tied=False) == []


def test_each_fault_is_named() -> None:
    found = {"a": (3, 2), "c": (1,)}
    assert faults(found, EXPECTED, tied=False) == [
        "missing: b",
        "a is [3, 2], not [2, 3]",
        "unmatched: c",
    ]


def test_a_tied_output_layer_may_be_stored_or_not() -> None:
    head = {"lm_head.weight": (5, 5)}
    assert faults({**EXPECTED, **head}, EXPECTED, tied=True) == []
    assert faults(EXPECTED, {**EXPECTED, **head}, tied=True) == []
    assert faults({**EXPECTED, **head}, EXPECTED, tied=False) == ["unmatched: lm_head.weight"]
    assert faults(EXPECTED, {**EXPECTED, **head}, tied=False) == ["missing: lm_head.weight"]


def test_many_faults_are_counted() -> None:
    lines = faults({}, {f"t{i}": (1,) for i in range(11)}, tied=False)
    assert len(lines) == 9
    assert lines[-1] == "and 3 more"


def test_a_directory_tells_the_shapes_of_all_its_files(tmp_path: Path) -> None:
    policy(0).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint_shapes(tmp_path) == {
        name: tuple(parameter.shape) for name, parameter in policy(0).named_parameters()
    }
