"""Which hardware a kind of work prefers: defaults by worker class, and declarations by domain.

    class Policy:
        @hw_mapping(hw_affinity={"swe": "h800", "default": "h20"})
        def generate(self, ...): ...

The decorator declares and dispatches nothing: it leaves a frozen `Affinity` on the method, which the resource
manager binds at deployment and the proxy filters workers by. After RollArt (OSDI '26), sections 5.1 to 5.3.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

DEFAULT = "default"
"""Stands for every domain that is not named."""

Preference = Literal["compute", "bandwidth", "cpu", "reward"]
WorkerClass = Literal["train", "rollout", "environment", "reward"]

CLASS_PREFERENCES: dict[WorkerClass, Preference] = {
    "train": "compute",
    "rollout": "bandwidth",
    "environment": "cpu",
    "reward": "reward",
}
"""Of each worker class: `compute` is the GPU with the most operations a byte of memory traffic, `bandwidth`
the one with the fewest, `reward` a function service where there is one, else what is nearest a local GPU."""

_ATTRIBUTE = "__hw_affinity__"
Method = TypeVar("Method", bound=Callable[..., object])


class UnknownAffinity(ValueError):
    """A declaration cannot be found, or names a domain or a pool that is not there."""


@dataclass(frozen=True, slots=True)
class Affinity(Mapping[str, str]):
    """The pool of each domain; under "default", that of every domain not named."""

    pools: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, mapping: Mapping[str, str]) -> "Affinity":
        return cls(tuple(sorted(mapping.items())))

    def pool_of(self, domain: str) -> str | None:
        """The domain's pool, or the default one; None where neither is declared: it goes anywhere."""
        pools = dict(self.pools)
        return pools.get(domain, pools.get(DEFAULT))

    def overridden(self, by: Mapping[str, str]) -> "Affinity":
        """This one, where `by` says nothing else."""
        return Affinity.of({**dict(self.pools), **by})

    def check(self, domains: Iterable[str], pools: Iterable[str], option: str) -> None:
        """Raises `UnknownAffinity`, one message for all that is wrong, unless it names only these."""
        known_domains, known_pools = {*domains, DEFAULT}, set(pools)
        wrong = [
            f"{domain!r} is no domain of the campaign"
            for domain, _ in self.pools
            if domain not in known_domains
        ]
        wrong += [
            f"{pool!r} (of {domain!r}) is no rollout pool"
            for domain, pool in self.pools
            if pool not in known_pools
        ]
        if wrong:
            raise UnknownAffinity(
                f"{option}: {'; '.join(wrong)}. Domains: {', '.join(sorted(known_domains))}. "
                f"Rollout pools: {', '.join(sorted(known_pools)) or 'none'}"
            )

    def __getitem__(self, domain: str) -> str:
        return dict(self.pools)[domain]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.pools))

    def __len__(self) -> int:
        return len(self.pools)


def hw_mapping(*, hw_affinity: Mapping[str, str]) -> Callable[[Method], Method]:
    """Declare on a method which pool serves each domain. Calls of the method are left as they are."""
    if not hw_affinity or not all(isinstance(item, str) for pair in hw_affinity.items() for item in pair):
        raise UnknownAffinity(f"hw_affinity maps domains to pools, both by name, not {dict(hw_affinity)!r}")
    affinity = Affinity.of(hw_affinity)

    def declare(method: Method) -> Method:
        setattr(method, _ATTRIBUTE, affinity)
        return method

    return declare


def affinity_of(method: object) -> Affinity | None:
    """What `hw_mapping` declared on this method, None where it has not."""
    declared = getattr(method, _ATTRIBUTE, None)
    return declared if isinstance(declared, Affinity) else None


def declared_affinity(path: str) -> Affinity:
    """What is declared on the method at `package.module:Class.method`. Raises `UnknownAffinity`."""
    module_name, separator, attributes = path.partition(":")
    if not separator or not module_name or not attributes:
        raise UnknownAffinity(f"{path!r} is not of the form package.module:Class.method")
    try:
        found: object = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownAffinity(f"{path!r} cannot be read: {error}") from None
    affinity = affinity_of(found)
    if affinity is None:
        raise UnknownAffinity(f"{path!r} declares no hardware: decorate it with infra.affinity.hw_mapping")
    return affinity
