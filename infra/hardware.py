"""The hardware catalogue: what one device of each type can do, and where each figure is from.

Sources. [P] RollArt (OSDI '26), Table 2. [N] the vendor's data sheet or architecture white paper, half of its
figure where that is with 2:4 sparsity. [R] ratio of published on-demand rents to that of an H100 (May 2026,
midpoint of specialised providers: A100 80 GB $1.30, H100 $3.00, H200 $4.00), an H100 counted as the H800 of
[P], the same silicon. [E] our estimate: check it against your own contract.
"""

from dataclasses import dataclass
from typing import Literal

HardwareKind = Literal["gpu", "cpu", "serverless"]


class UnknownHardware(ValueError):
    """The catalogue has no hardware of this name."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Peak figures, which nothing reaches: who computes with them says at what efficiency."""

    name: str
    kind: HardwareKind
    tflops: float  # dense bfloat16, 10**12 operations a second
    memory_gb: float  # 10**9 bytes
    bandwidth_tb_s: float  # of its memory, 10**12 bytes a second
    cost: float  # of an hour, an H20's is 1
    source: str

    @property
    def ridge(self) -> float:
        """Operations a byte at which compute and memory take equally long: high is a compute GPU."""
        return self.tflops / self.bandwidth_tb_s

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


CATALOGUE: dict[str, Hardware] = {
    entry.name: entry
    for entry in (
        Hardware("h20", "gpu", 148.0, 96, 4.0, 1.0, "[P]"),
        Hardware("h800", "gpu", 989.5, 80, 3.35, 2.85, "[P]"),
        Hardware("h100", "gpu", 989.5, 80, 3.35, 2.85, "[N] H100 SXM data sheet; cost [R]"),
        Hardware("h200", "gpu", 989.5, 141, 4.8, 3.8, "[N] H200 SXM data sheet; cost [R]"),
        Hardware("a100", "gpu", 312.0, 80, 2.039, 1.24, "[N] A100 80 GB SXM data sheet; cost [R]"),
        Hardware("b200", "gpu", 2250.0, 180, 7.7, 5.0, "[N] HGX B200 data sheet; cost [E]"),
        Hardware("l40s", "gpu", 362.05, 48, 0.864, 0.8, "[N] L40S data sheet; cost [E]: 35 % below an A100"),
        Hardware("rtx4090", "gpu", 165.2, 24, 1.008, 0.45, "[N] Ada white paper, FP32 accumulate; cost [E]"),
        Hardware(
            "cpu",
            "cpu",
            14.3,
            512,
            0.307,
            0.3,
            "[N] a 56-core Xeon 8480+: 128 bfloat16 operations a cycle and core (AVX-512) at 2.0 GHz, "
            "8 channels of DDR5-4800; memory and cost [E]",
        ),
        Hardware(
            "functions", "serverless", 0.08, 4, 0.01, 0.02, "[E] a function with one vCPU, while it runs"
        ),
    )
}


def hardware(name: str) -> Hardware:
    """The catalogue's entry; case, blanks, - and _ make no difference. Raises `UnknownHardware`."""
    found = CATALOGUE.get(plain_name(name))
    if found is None:
        raise UnknownHardware(f"there is no hardware {name!r} in the catalogue: {', '.join(CATALOGUE)}")
    return found


def plain_name(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in " -_")
