"""The hardware catalogue: what one device of each type can do, and where each figure is from.

Sources. [P] RollArt (OSDI '26), Table 2. [N] the vendor's data sheet or architecture white paper, half of its
figure where that is with 2:4 sparsity. [R] ratio of published on-demand rents to that of an H100 (May 2026,
midpoint of specialised providers: A100 80 GB $1.30, H100 $3.00, H200 $4.00), an H100 counted as the H800 of
[P], the same silicon. [E] our estimate: check it against your own contract. [M] measured: what vLLM's run
of `../shared/anchors/vllm-serving` reports. [S] LLMServingSim's description of the hardware beside the same
run. [D] what the driver reports for such a device (nvidia-smi), from memory: look at your own.
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
    usd_hour: float = 0.0  # of renting one on demand
    link_gb_s: float = 0.0  # 10**9 bytes a second, one direction, to the devices of its node
    network_gb_s: float = 0.0  # 10**9 bytes a second, one direction, of its network card to other nodes
    reported_mib: int = 0  # memory that the driver reports, 2**20 bytes; 0: not known, `memory_gb` counts
    link_source: str = ""  # of link, network, price and reported memory

    @property
    def ridge(self) -> float:
        """Operations a byte at which compute and memory take equally long: high is a compute GPU."""
        return self.tflops / self.bandwidth_tb_s

    @property
    def memory_bytes(self) -> float:
        """As it is sold: the careful figure."""
        return self.memory_gb * 1e9

    @property
    def usable_bytes(self) -> float:
        """As an engine counts it: of what the driver reports, where that is known."""
        return self.reported_mib * 2**20 if self.reported_mib else self.memory_bytes


USD_OF_AN_H20_HOUR = 3.00 / 2.85
"""An H100's rent of [R] over its cost in H20s: what turns `cost` into dollars and back."""


def _rent(cost: float) -> float:
    return round(cost * USD_OF_AN_H20_HOUR, 2)


CATALOGUE: dict[str, Hardware] = {
    entry.name: entry
    for entry in (
        Hardware(
            name="h20",
            kind="gpu",
            tflops=148.0,
            memory_gb=96,
            bandwidth_tb_s=4.0,
            cost=1.0,
            source="[P]",
            usd_hour=_rent(1.0),
            link_gb_s=450,
            network_gb_s=50,
            reported_mib=97871,
            link_source="link [P] 900 GB/s both ways; network [P] 400 Gb/s a device; rent [R]; memory [D]",
        ),
        Hardware(
            name="h800",
            kind="gpu",
            tflops=989.5,
            memory_gb=80,
            bandwidth_tb_s=3.35,
            cost=2.85,
            source="[P]",
            usd_hour=3.00,
            link_gb_s=200,
            network_gb_s=50,
            reported_mib=81559,
            link_source="link [P] 400 GB/s both ways; network [P] 400 Gb/s a device; rent [R]; memory [D]",
        ),
        Hardware(
            name="h100",
            kind="gpu",
            tflops=989.5,
            memory_gb=80,
            bandwidth_tb_s=3.35,
            cost=2.85,
            source="[N] H100 SXM data sheet; cost [R]",
            usd_hour=3.00,
            link_gb_s=450,
            network_gb_s=50,
            reported_mib=81559,
            link_source="link [N]; network [N] DGX H100, 400 Gb/s a device; rent [R]; memory [D]",
        ),
        Hardware(
            name="h200",
            kind="gpu",
            tflops=989.5,
            memory_gb=141,
            bandwidth_tb_s=4.8,
            cost=3.8,
            source="[N] H200 SXM data sheet; cost [R]",
            usd_hour=4.00,
            link_gb_s=450,
            network_gb_s=50,
            reported_mib=143771,
            link_source="link [N]; network [N] DGX H200, 400 Gb/s a device; rent [R]; memory [D]",
        ),
        Hardware(
            name="a100",
            kind="gpu",
            tflops=312.0,
            memory_gb=80,
            bandwidth_tb_s=2.039,
            cost=1.24,
            source="[N] A100 80 GB SXM data sheet; cost [R]",
            usd_hour=1.30,
            link_gb_s=300,
            network_gb_s=25,
            reported_mib=81920,
            link_source="link [N]; network [N] DGX A100, 200 Gb/s a device; rent [R]; memory [D]",
        ),
        Hardware(
            name="b200",
            kind="gpu",
            tflops=2250.0,
            memory_gb=180,
            bandwidth_tb_s=7.7,
            cost=5.0,
            source="[N] HGX B200 data sheet; cost [E]",
            usd_hour=_rent(5.0),
            link_gb_s=900,
            network_gb_s=50,
            reported_mib=183359,
            link_source="link [N]; network [N] DGX B200, 400 Gb/s a device; rent [E] of its cost; memory [D]",
        ),
        Hardware(
            name="l40s",
            kind="gpu",
            tflops=362.05,
            memory_gb=48,
            bandwidth_tb_s=0.864,
            cost=0.8,
            source="[N] L40S data sheet; cost [E]: 35 % below an A100",
            usd_hour=_rent(0.8),
            link_gb_s=32,
            network_gb_s=25,
            reported_mib=46068,
            link_source="link [N] PCIe 4.0 x16; network [E] 200 Gb/s; rent [E], of its cost; memory [D]",
        ),
        Hardware(
            name="rtx4090",
            kind="gpu",
            tflops=165.2,
            memory_gb=24,
            bandwidth_tb_s=1.008,
            cost=0.45,
            source="[N] Ada white paper, FP32 accumulate; cost [E]",
            usd_hour=_rent(0.45),
            link_gb_s=16,
            network_gb_s=12.5,
            reported_mib=24081,
            link_source="link [S] through the host; network [E] 100 Gb/s; rent [E], of its cost; memory [M]",
        ),
        Hardware(
            name="rtxpro6000",
            kind="gpu",
            tflops=503.8,
            memory_gb=96,
            bandwidth_tb_s=1.597,
            cost=1.6,
            source="[N] RTX PRO 6000 Blackwell server edition's data sheet, an eighth of 4 PFLOPS of sparse "
            "FP4; cost [E]",
            usd_hour=_rent(1.6),
            link_gb_s=16,
            network_gb_s=25,
            reported_mib=97887,
            link_source="link [S] through the host; network [E] 200 Gb/s; rent [E], of its cost; memory [D]",
        ),
        Hardware(
            name="cpu",
            kind="cpu",
            tflops=14.3,
            memory_gb=512,
            bandwidth_tb_s=0.307,
            cost=0.3,
            source="[N] a 56-core Xeon 8480+: 128 bfloat16 operations a cycle and core (AVX-512) at 2.0 GHz, "
            "8 channels of DDR5-4800; memory and cost [E]",
            usd_hour=_rent(0.3),
            link_gb_s=48,
            network_gb_s=12.5,
            link_source="link [N] UPI, three of 16 GB/s; network [E] 100 Gb/s; rent [E], of its cost",
        ),
        Hardware(
            name="functions",
            kind="serverless",
            tflops=0.08,
            memory_gb=4,
            bandwidth_tb_s=0.01,
            cost=0.02,
            source="[E] a function with one vCPU, while it runs",
            usd_hour=_rent(0.02),
            link_gb_s=0.125,
            network_gb_s=0.125,
            link_source="network [E] 1 Gb/s; rent [E], of its cost",
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
