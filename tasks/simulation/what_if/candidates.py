"""Candidates of a what-if: which options of a campaign and of its cluster file vary, and over which values.

An option is named as on the command line of a campaign: `train.alpha`; one of the cluster file has `cluster.`
before it: `cluster.rollout.0.devices`. Options that are tied with `+` take the same value together.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import yaml

from tasks.train.modes import MODES

Point = tuple[int, ...]
"""A candidate: the place of its value on each axis."""

CLUSTER = "cluster"
MODE, ALPHA = "train.mode", "train.alpha"
SIZED = tuple(f"{CLUSTER}.{part}" for part in ("rollout", "train", "reward"))
"""Parts of a cluster file that hold devices of a pool."""


class VaryError(ValueError):
    """What is to vary cannot: the message says which option and why."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Options that vary together over the same values."""

    options: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """`option=value,value` or `option+option=value,value`; values as in YAML. Raises `VaryError`."""
        names, separator, values = text.partition("=")
        options = tuple(name.strip() for name in names.split("+"))
        if not separator or not all(options):
            raise VaryError(f"{text!r} is not of the form option=value,value")
        try:
            parsed = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError as error:
            raise VaryError(f"the values of {names} are not YAML: {error}") from None
        if not parsed:
            raise VaryError(f"{names} has no value to take")
        if any(parsed.count(value) > 1 for value in parsed):
            raise VaryError(f"{names} takes a value twice: {values}")
        return cls(options, tuple(parsed))

    @property
    def ordered(self) -> bool:
        """Numbers have neighbours; of other values any is the neighbour of any."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True, slots=True)
class Space:
    """All combinations of the axes' values. Numbers are put in order, so that neighbours are next to each
    other."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis]) -> "Space":
        """Raises `VaryError` when an option is on two axes."""
        seen: dict[str, str] = {}
        for axis in axes:
            for option in axis.options:
                if option in seen:
                    raise VaryError(
                        f"{option} varies twice: in {seen[option]!r} and {'+'.join(axis.options)!r}"
                    )
                seen[option] = "+".join(axis.options)
        return cls(
            tuple(Axis(axis.options, tuple(sorted(axis.values))) if axis.ordered else axis for axis in axes)
        )

    @property
    def size(self) -> int:
        return prod(len(axis.values) for axis in self.axes)

    def points(self) -> Iterator[Point]:
        return product(*(range(len(axis.values)) for axis in self.axes))

    def at(self, place: int) -> Point:
        """The point at a place of `points`."""
        point: list[int] = []
        for axis in reversed(self.axes):
            place, index = divmod(place, len(axis.values))
            point.append(index)
        return tuple(reversed(point))

    def neighbours(self, point: Point) -> Iterator[Point]:
        """One step on one axis; on an axis without order, every other value is one step away."""
        for number, (axis, index) in enumerate(zip(self.axes, point, strict=True)):
            others = (index - 1, index + 1) if axis.ordered else range(len(axis.values))
            for other in others:
                if other != index and 0 <= other < len(axis.values):
                    yield (*point[:number], other, *point[number + 1 :])

    def changes(self, point: Point) -> dict[str, Any]:
        """The point's value of every option."""
        return {
            option: axis.values[index]
            for axis, index in zip(self.axes, point, strict=True)
            for option in axis.options
        }

    def label(self, point: Point) -> str:
        """What tells the candidate from the others; empty where nothing varies."""
        return ", ".join(
            f"{_short(axis.options[0])}={axis.values[index]}"
            for axis, index in zip(self.axes, point, strict=True)
            if len(axis.values) > 1
        )


def changed(
    campaign: Mapping[str, Any], cluster: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain data of the campaign and of the cluster file with these options set. Neither is validated.

    A mode that is set without `train.alpha` takes the alpha nearest to the campaign's that it allows. A pool
    grows and shrinks with the parts that hold its devices, where its own size is not set too.
    Raises `VaryError` for an option that cannot be there.
    """
    documents = {"campaign": deepcopy(dict(campaign)), CLUSTER: deepcopy(dict(cluster))}
    for option, value in changes.items():
        document, path = ("campaign", option.split("."))
        if path[0] == CLUSTER:
            document, path = CLUSTER, path[1:]
        _set(documents[document], path, value, option)
    if MODE in changes and ALPHA not in changes:
        _fit_alpha(documents["campaign"])
    if any(option.startswith(SIZED) for option in changes):
        _fit_pools(cluster, documents[CLUSTER], changes)
    return documents["campaign"], documents[CLUSTER]


def _set(data: Any, path: Sequence[str], value: Any, option: str) -> None:
    for key in path[:-1]:
        data = _step(data, key, option)
    last = path[-1]
    if isinstance(data, list):
        _step(data, last, option)
        data[int(last)] = value
    elif isinstance(data, dict):
        data[last] = value
    else:
        raise VaryError(f"{option}: there is no such option")


def _step(data: Any, key: str, option: str) -> Any:
    if isinstance(data, list):
        if not key.isdigit() or int(key) >= len(data):
            raise VaryError(f"{option}: {key!r} is no place in a list of {len(data)}")
        return data[int(key)]
    if isinstance(data, dict):
        if data.get(key) is None:
            data[key] = {}
        return data[key]
    raise VaryError(f"{option}: there is no such option")


def _fit_alpha(campaign: dict[str, Any]) -> None:
    train = campaign["train"]
    mode = MODES.get(train["mode"])
    if mode is not None:
        alpha = max(train.get("alpha", 1), mode.lowest_alpha)
        train["alpha"] = alpha if mode.highest_alpha is None else min(alpha, mode.highest_alpha)


def _fit_pools(before: Mapping[str, Any], after: dict[str, Any], changes: Mapping[str, Any]) -> None:
    was, needs = devices_by_pool(before), devices_by_pool(after)
    for name, pool in list(after.get("pools", {}).items()):
        more = needs.get(name, 0) - was.get(name, 0)
        if not more or f"{CLUSTER}.pools.{name}.devices" in changes:
            continue
        pool["devices"] = int(pool.get("devices") or 0) + more
        if pool["devices"] == 0:
            del after["pools"][name]


def devices_by_pool(cluster: Mapping[str, Any]) -> dict[str, int]:
    """Devices of each pool that engines, trainer and dedicated reward workers take, in plain data of a
    cluster file."""
    needs: dict[str, int] = {}
    train, reward = cluster.get("train") or {}, cluster.get("reward") or {}
    parts = [*(cluster.get("rollout") or []), *([] if train.get("colocated") else [train])]
    if reward.get("kind") == "dedicated":
        parts.append({"pool": reward.get("pool"), "devices": reward.get("workers")})
    for part in parts:
        if part.get("pool"):
            needs[part["pool"]] = needs.get(part["pool"], 0) + int(part.get("devices") or 0)
    return needs


def _short(option: str) -> str:
    """The end of an option's name that says what it is: `rollout.0.devices`, `alpha`."""
    parts = option.split(".")
    return ".".join(parts[1:]) if parts[0] == CLUSTER else parts[-1]
