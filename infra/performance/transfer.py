"""How long a publication of weights takes, by transport."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Transport:
    """A way from the trainer to the engines: a push to where they take it from, and their pulls.

    A push of so many bytes takes `push_latency_s` and the time at `push_gb_s` (10**9 bytes a second); a
    transport without a store in between has none (`push_gb_s` 0), its engines receive directly. A pull takes
    `pull_latency_s` and the time at `pull_gb_s`; where all pullers together would draw more than
    `shared_gb_s`, they share that (0: no bound).
    """

    name: str
    push_latency_s: float
    push_gb_s: float
    pull_latency_s: float
    pull_gb_s: float
    shared_gb_s: float = 0.0
    source: str = ""

    def push_seconds(self, bytes_: float) -> float:
        """Until the bytes are where pulls find them; 0 where engines receive directly."""
        return self.push_latency_s + bytes_ / (self.push_gb_s * 1e9) if self.push_gb_s else 0.0

    def pull_seconds(self, bytes_: float, pullers: int = 1) -> float:
        """Until each of so many pullers, all at once, has the bytes."""
        rate = self.pull_gb_s
        if self.shared_gb_s:
            rate = min(rate, self.shared_gb_s / max(pullers, 1))
        return self.pull_latency_s + bytes_ / (rate * 1e9)


_T3 = "RollArt's Table 3"
_T4 = "RollArt's Table 4"

TRANSPORTS: dict[str, Transport] = {
    entry.name: entry
    for entry in (
        Transport("nccl", 0, 0, 0.1, 37.75, source="inferred: 400 Gb/s at the share of Vidur's all-reduces"),
        Transport("tcp", 0, 0, 0, 2.208, source=f"fitted to the 8B row of {_T3}: 15.26 GB in 6.911 s"),
        Transport(
            "rdma",
            0,
            0,
            4.14,
            11.51,
            source=f"fitted to the 8B and 32B rows of {_T3}: 15.26 GB in 5.466 s, 61.02 GB in 9.442 s",
        ),
        Transport(
            "mooncake",
            0,
            0.471,
            0,
            2.461,
            source=f"fitted to the 8B row of {_T4}: 15.26 GB pushed in 32.4 s, pulled in 6.2 s",
        ),
        Transport(
            "store",
            0.03,
            1.2,
            0.02,
            1.2,
            12.5,
            source="inferred: an object store of 100 Gb/s in all, 10 Gb/s a connection, 20-30 ms a request",
        ),
    )
}


def transport(name: str, **changes: float | None) -> Transport:
    """The catalogue's entry with some figures replaced; None leaves one. Raises KeyError with the names."""
    if name not in TRANSPORTS:
        raise KeyError(f"there is no transport {name!r}: {', '.join(TRANSPORTS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    return replace(TRANSPORTS[name], **given)  # type: ignore[arg-type]
