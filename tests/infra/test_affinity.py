import pytest

from infra.affinity import Affinity, UnknownAffinity, affinity_of, declared_affinity, hw_mapping


class Policy:
    @hw_mapping(hw_affinity={"swe": "h800", "default": "h20"})
    def generate(self, tokens: list[int]) -> int:
        """Counts."""
        return len(tokens)

    def score(self) -> None:
        pass


def test_the_decorator_declares_and_leaves_the_method_as_it_is() -> None:
    assert Policy().generate([1, 2, 3]) == 3
    assert Policy.generate.__doc__ == "Counts."
    assert affinity_of(Policy.generate) == Affinity.of({"swe": "h800", "default": "h20"})
    assert affinity_of(Policy().generate) == affinity_of(Policy.generate)
    assert affinity_of(Policy.score) is None


def test_a_domain_that_is_not_named_gets_the_default_pool() -> None:
    affinity = Affinity.of({"swe": "h800", "default": "h20"})
    assert [affinity.pool_of("swe"), affinity.pool_of("math")] == ["h800", "h20"]
    assert Affinity.of({"swe": "h800"}).pool_of("math") is None


def test_an_affinity_is_a_frozen_mapping() -> None:
    affinity = Affinity.of({"swe": "h800", "default": "h20"})
    assert dict(affinity) == {"swe": "h800", "default": "h20"}
    assert hash(affinity) == hash(Affinity.of({"default": "h20", "swe": "h800"}))
    with pytest.raises(AttributeError):
        affinity.pools = ()  # type: ignore[misc]


def test_what_overrides_leaves_the_rest() -> None:
    affinity = Affinity.of({"swe": "h800", "default": "h20"})
    assert dict(affinity.overridden({"math": "h800", "swe": "h20"})) == {
        "math": "h800",
        "swe": "h20",
        "default": "h20",
    }


def test_domains_and_pools_that_are_not_there_are_one_error() -> None:
    affinity = Affinity.of({"swe": "h800", "maths": "h20", "default": "a100"})
    affinity.check(["swe", "maths"], ["h800", "h20", "a100"], "affinity.domains")
    with pytest.raises(UnknownAffinity) as raised:
        affinity.check(["swe", "math"], ["h800", "h20"], "affinity.domains")
    message = str(raised.value)
    assert message.startswith("affinity.domains: 'maths' is no domain")
    assert "'a100' (of 'default') is no rollout pool" in message


@pytest.mark.parametrize("mapping", [{}, {"swe": 1}, {1: "h20"}])
def test_a_declaration_maps_names_to_names(mapping: dict[str, str]) -> None:
    with pytest.raises(UnknownAffinity, match="by name"):
        hw_mapping(hw_affinity=mapping)


def test_a_declaration_is_found_by_its_path() -> None:
    assert declared_affinity(f"{__name__}:Policy.generate") == affinity_of(Policy.generate)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Policy.generate", "not of the form"),
        ("no_such_module:Policy.generate", "cannot be read"),
        (f"{__name__}:Policy.missing", "cannot be read"),
        (f"{__name__}:Policy.score", "decorate it with"),
    ],
)
def test_a_path_without_a_declaration_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(UnknownAffinity, match=message):
        declared_affinity(path)
