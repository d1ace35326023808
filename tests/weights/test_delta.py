"""A delta turns one content into the other, bit for bit, in every encoding."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tasks.weights.delta import apply, encode
from tasks.weights.manifest import CorruptWeights


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    elements = draw(st.integers(1, 300))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = generator.integers(0, 256, elements * itemsize, dtype=np.uint8)
    mask = generator.random(len(before)) < draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    now = before ^ (mask * generator.integers(0, 256, len(before), dtype=np.uint8)).astype(np.uint8)
    return before, now, itemsize


@given(versions())
def test_a_delta_makes_the_next_version_and_undoes_itself(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    before, now, itemsize = case
    encoding, payload = encode(before, now, itemsize)
    content = before.copy()
    apply(encoding, payload, content, itemsize)
    assert np.array_equal(content, now)
    if encoding != "raw":
        apply(encoding, payload, content, itemsize)
        assert np.array_equal(content, before)
    assert len(payload) <= len(now)


@pytest.mark.parametrize(
    ("share", "encoding"), [(0.0, "same"), (0.004, "sparse"), (0.05, "sparse"), (0.6, "xor"), (1.0, "raw")]
)
def test_the_smallest_encoding_is_taken(share: float, encoding: str) -> None:
    generator = np.random.default_rng(0)
    before = generator.integers(0, 2**16, 100_000, dtype=np.uint16)
    flips = generator.integers(1, 2**16 if share == 1.0 else 2, len(before), dtype=np.uint16)
    now = before ^ (flips * (generator.random(len(before)) < share)).astype(np.uint16)
    found, payload = encode(before.view(np.uint8), now.view(np.uint8), 2)
    assert found == encoding
    # One bit of every element says whether its lowest bit changed: the entropy bounds what can be reached.
    if 0 < share < 1:
        entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * len(before) / 8
        assert entropy * 0.9 < len(payload) < entropy * 2.5


def test_bf16_is_compared_by_elements_also_where_bytes_do_not_divide() -> None:
    before = np.arange(9, dtype=np.uint8)
    now = before.copy()
    now[8] ^= 3
    encoding, payload = encode(before, now, 2)
    content = before.copy()
    apply(encoding, payload, content, 2)
    assert np.array_equal(content, now)


def test_a_payload_that_cannot_be_one_is_refused() -> None:
    content = np.zeros(64, np.uint8)
    squeeze = zstandard.ZstdCompressor().compress

    def sparse(gaps: list[int], values: list[int]) -> bytes:
        planes = np.array(gaps, "<u4").view(np.uint8).reshape(-1, 4).T.tobytes()
        return squeeze(planes + np.array(values, "<u2").view(np.uint8).reshape(-1, 2).T.tobytes())

    apply("sparse", sparse([3, 28], [1, 258]), content, 2)
    assert content.view("<u2").nonzero()[0].tolist() == [3, 31]
    assert content.view("<u2")[[3, 31]].tolist() == [1, 258]
    was = content.copy()
    for encoding, payload in (
        ("sparse", b"not zstandard"),
        ("sparse", sparse([3, 28], [1, 258])[:-3]),
        ("sparse", sparse([3, 29], [1, 1])),
        ("sparse", sparse([3, 0], [1, 1])),
        ("sparse", squeeze(b"12345")),
        ("xor", squeeze(bytes(63))),
        ("xor", squeeze(bytes(2**30))),
        ("raw", bytes(63)),
    ):
        with pytest.raises(CorruptWeights):
            apply(encoding, payload, content, 2)  # type: ignore[arg-type]
        assert np.array_equal(content, was)
