"""Weight publication is whole or not at all, and a reader that finds it otherwise says so."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load as load_safetensors

from blocks.weight_store import WeightStore, open_weight_store
from tasks.weights.config import PublicationConfig
from tasks.weights.manifest import Publication
from tasks.weights.publication import (
    CorruptWeights,
    MismatchedWeights,
    MissingWeights,
    TruncatedWeights,
    WeightsError,
    collect,
    load,
    publish,
    read_publication,
    require_match,
)
from tests.mooncake import fresh_url
from tests.weights.models import assert_equal, model


def buckets_of(size: int) -> PublicationConfig:
    return PublicationConfig(bucket_mib=size / 2**20)


def tamper(weights: WeightStore, key: str, data: bytes) -> None:
    weights.store.delete_many([key])
    weights.store.put(key, data)


def resealed(publication: Publication, **changes: object) -> bytes:
    """A manifest that was forged with care."""
    return publication.model_copy(update=changes).seal().model_dump_json().encode()


@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**6])
def test_what_is_published_is_loaded_in_buckets_of_any_size(weights: WeightStore, bucket_bytes: int) -> None:
    publication = publish(weights, 3, model().items(), buckets_of(bucket_bytes))
    assert (
        len(publication.buckets) == {1: 7, 600: 6, 10**6: 1}[bucket_bytes]
    )  # 512 bytes a layer, 32 the norm
    assert weights.versions() == [3]
    assert_equal(load(weights, 3), model())
    assert read_publication(weights, 3) == publication


def test_tensors_of_every_kind_come_back_bit_for_bit(weights: WeightStore) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "bf16": torch.tensor([1.0, -0.0, float("nan"), float("inf")], dtype=torch.bfloat16),
        "fp8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor([2**62, -1]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "empty too": torch.zeros(5, 0),
        "transposed": base.t(),
        "slice": base[1:3],
        "tied a": base,
        "tied b": base,
        "trained": torch.nn.Parameter(torch.ones(3)),
    }
    publish(weights, 0, tensors.items())
    loaded = load(weights, 0)
    assert_equal(loaded, {name: tensor.detach() for name, tensor in tensors.items()})
    loaded["tied a"].zero_()
    assert torch.equal(loaded["tied b"], base)
    assert not loaded["trained"].requires_grad


def test_the_manifest_says_what_a_reader_must_find(weights: WeightStore) -> None:
    publish(weights, 1, {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}.items())
    manifest = json.loads(weights.get_manifest(1))
    assert manifest["version"] == 1
    assert manifest["tensors"]["w"]["shape"] == [2, 3]
    assert manifest["tensors"]["w"]["dtype"] == "bfloat16"
    (piece,) = manifest["tensors"]["w"]["pieces"]
    assert piece["checksum"] == xxhash.xxh3_128(b"\0" * 12).hexdigest()
    (bucket,) = manifest["buckets"]
    (data,) = weights.get_buckets(1, [bucket["name"]])
    assert bucket["size"] == len(data)
    assert bytes(data)[piece["full"]["offset"] :] == b"\0" * 12


def test_a_bucket_is_a_safetensors_file(weights: WeightStore) -> None:
    tensors = {
        "wide": torch.randn(3, 5),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.ones(3).half(),
    }
    publication = publish(weights, 1, tensors.items())
    (data,) = weights.get_buckets(1, [publication.buckets[0].name])
    assert_equal(load_safetensors(bytes(data)), tensors)


def test_floating_point_weights_travel_in_the_configured_dtype(weights: WeightStore) -> None:
    tensors = {"w": torch.tensor([1.0, 1 / 3]), "ids": torch.tensor([2**40])}
    publish(weights, 1, tensors.items(), PublicationConfig(dtype="bfloat16"))
    # 1/3 in bfloat16 (8 significant bits): 171/512
    assert_equal(load(weights, 1), {"w": torch.tensor([1.0, 171 / 512]).bfloat16(), "ids": tensors["ids"]})


def test_nothing_of_a_version_is_seen_before_its_end(weights: WeightStore) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for item in model().items():
            yield item
            assert weights.versions() == []
            with pytest.raises(MissingWeights, match="version 1 is not published"):
                load(weights, 1)

    publish(weights, 1, tensors(), buckets_of(1))
    assert weights.versions() == [1]


def test_a_publication_that_fails_leaves_the_version_as_it_was(weights: WeightStore) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model(1).items()
        raise OSError("the trainer's node went away")

    publish(weights, 1, model(0).items(), buckets_of(1))
    for version in (1, 2):
        with pytest.raises(OSError, match="went away"):
            publish(weights, version, failing(), buckets_of(1))
    assert weights.versions() == [1]
    assert_equal(load(weights, 1), model(0))


def test_publishing_a_version_again_replaces_it_whole(weights: WeightStore) -> None:
    first = publish(weights, 1, model(0).items(), buckets_of(1))
    second = publish(weights, 1, model(1).items(), buckets_of(600))
    assert first.incarnation != second.incarnation
    assert_equal(load(weights, 1), model(1))
    # A reader that had the first manifest still finds what that named.
    assert len(weights.get_buckets(1, [bucket.name for bucket in first.buckets])) == 7
    assert collect(weights, {1}) == []
    assert weights.incarnations(1) == [second.incarnation]
    assert_equal(load(weights, 1), model(1))


def test_a_payload_that_did_not_change_is_flagged(weights: WeightStore) -> None:
    first = publish(weights, 4, model().items())
    assert (first.compared_with, first.changed, first.unchanged) == (None, 7, False)
    same = publish(weights, 5, model().items(), buckets_of(1))
    assert (same.compared_with, same.changed, same.unchanged) == (4, 0, True)
    stepped = {**model(), "norm": model()["norm"] + 1e-6}
    one = publish(weights, 6, stepped.items())
    assert (one.compared_with, one.changed, one.unchanged) == (5, 1, False)
    adapter = publish(weights, 7, {**stepped, "lora_a": torch.zeros(2)}.items())
    assert (adapter.changed, adapter.unchanged) == (1, False)
    gone = publish(weights, 8, {"norm": stepped["norm"]}.items())
    assert gone.changed == 7
    again = publish(weights, 5, stepped.items())
    assert (again.compared_with, again.changed) == (4, 1)


def test_no_tensors_and_names_given_twice_are_refused(weights: WeightStore) -> None:
    with pytest.raises(WeightsError, match="no tensors"):
        publish(weights, 1, [])
    for bucket_bytes in (1, 10**6):
        with pytest.raises(WeightsError, match="norm is given twice"):
            publish(weights, 1, [*model().items(), ("norm", torch.zeros(8))], buckets_of(bucket_bytes))
    with pytest.raises(WeightsError, match="complex64, which cannot be published"):
        publish(weights, 1, {"w": torch.zeros(2, dtype=torch.complex64)}.items())
    assert weights.versions() == []


def test_truncated_corrupt_and_missing_buckets_are_told_apart(weights: WeightStore) -> None:
    publication = publish(weights, 1, model().items(), buckets_of(600))
    bucket = publication.buckets[3].name
    key = f"v00000001/{bucket}"
    whole = bytes(weights.store.get(key))
    for length in (7, len(whole) // 2, len(whole) - 1):
        tamper(weights, key, whole[:length])
        with pytest.raises(TruncatedWeights, match=f"{bucket} has {length} bytes, not {len(whole)}"):
            load(weights, 1)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    tamper(weights, key, bytes(flipped))
    with pytest.raises(CorruptWeights, match=bucket):
        load(weights, 1)
    weights.store.delete(key)
    with pytest.raises(MissingWeights, match=bucket):
        load(weights, 1)
    weights.store.put(key, whole)
    assert_equal(load(weights, 1), model())


def test_a_manifest_that_disagrees_with_its_buckets_is_refused(weights: WeightStore) -> None:
    published = publish(weights, 1, model().items())
    entry = published.tensors["norm"]

    def with_norm(**changes: object) -> dict[str, object]:
        return {"tensors": {**published.tensors, "norm": entry.model_copy(update=changes)}}

    beyond = entry.pieces[0].model_copy(
        update={"full": entry.pieces[0].full.model_copy(update={"offset": 10**6})}
    )
    for changes, error, message in (
        (with_norm(shape=(4, 3)), MismatchedWeights, r"norm has 32 bytes, which is not float32 \[4, 3\]"),
        (with_norm(dtype="bfloat16"), MismatchedWeights, r"not bfloat16 \[8\]"),
        (with_norm(dtype="float31"), CorruptWeights, "float31"),
        (with_norm(pieces=(beyond,)), CorruptWeights, "bytes that there are not"),
        ({"version": 2}, CorruptWeights, "says it is of 2"),
        ({"depth": 1}, CorruptWeights, "impossible base"),
        (
            {"buckets": (published.buckets[0].model_copy(update={"name": "../../x"}),)},
            CorruptWeights,
            "no name",
        ),
    ):
        weights.put_manifest(1, resealed(published, **changes))
        with pytest.raises(error, match=message):
            load(weights, 1)
    original = published.model_dump_json()
    changed = original.replace('"shape":[8]', '"shape":[4,2]')
    assert changed != original
    for manifest in (original[:-20], "{}", changed):
        weights.put_manifest(1, manifest.encode())
        with pytest.raises(CorruptWeights, match="manifest"):
            load(weights, 1)
    weights.put_manifest(1, original.encode())
    assert_equal(load(weights, 1), model())


def test_a_version_that_does_not_fit_the_model_is_refused_by_name(weights: WeightStore) -> None:
    publication = publish(weights, 1, model().items())
    require_match(publication, model())
    with pytest.raises(MismatchedWeights, match="missing: lora_a, lora_b"):
        require_match(publication, {**model(), "lora_b": torch.zeros(1), "lora_a": torch.zeros(1)})
    with pytest.raises(MismatchedWeights, match="unmatched: norm"):
        require_match(publication, {name: t for name, t in model().items() if name != "norm"})
    with pytest.raises(MismatchedWeights, match="different: norm is float32"):
        require_match(publication, {**model(), "norm": torch.zeros(8, dtype=torch.bfloat16)})


def test_versions_that_are_not_kept_go_with_everything_unfinished(weights: WeightStore) -> None:
    for version in range(4):
        publish(weights, version, model(version).items())
    weights.put_bucket(9, "unfinished", 0, b"x")
    weights.put_bucket(3, "unfinished", 0, b"x")
    assert collect(weights, {2, 3}) == [0, 1, 9]
    assert weights.versions() == [2, 3]
    assert sorted(weights.folders()) == [2, 3]
    assert_equal(load(weights, 3), model(3))
    assert len(weights.incarnations(3)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "mooncake"])
def test_a_trainer_killed_while_it_publishes_leaves_whole_versions_only(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path) if kind == "local" else fresh_url()
    program = textwrap.dedent(
        """
        import sys, torch
        from blocks.weight_store import open_weight_store
        from tasks.weights.config import PublicationConfig
        from tasks.weights.publication import publish
        store = open_weight_store(sys.argv[1])
        for version in range(10**6):
            tensors = [(f"w{i}", torch.full((300_000,), float(version))) for i in range(4)]
            publish(store, version % 5, tensors, PublicationConfig(bucket_mib=0.001))
            print(version, flush=True)
        """
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, url],
        stdout=subprocess.PIPE,
        cwd=os.getcwd(),
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdout is not None
    while int(trainer.stdout.readline()) < 7:
        pass
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    # Nothing of it is alive: what is read is what outlived it.
    store = open_weight_store(url)
    assert store.versions() == [0, 1, 2, 3, 4]
    for version in store.versions():
        loaded = load(store, version)
        values = {float(tensor[0]) for tensor in loaded.values()}
        assert len(values) == 1
        assert values.pop() % 5 == version
        assert all(bool((tensor == tensor[0]).all()) for tensor in loaded.values())
    publish(store, 5, model().items())
    assert collect(store, {5}) == [0, 1, 2, 3, 4]
    assert store.folders() == [5]
