"""What a campaign says of hardware affinity: which pool serves a domain, and whether that may change."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from infra.config import Config
from infra.hardware import Hardware, UnknownHardware, hardware

PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$")]


def require_known(named: dict[str, str]) -> dict[str, str]:
    """Raises ValueError, naming the pool, unless the catalogue has the hardware of every pool."""
    for pool, name in named.items():
        try:
            hardware(name)
        except UnknownHardware as error:
            raise ValueError(f"{pool}: {error}") from None
    return named


class AffinityConfig(Config):
    """Domains are generated for on the pools named here; a new trajectory goes elsewhere only while its pool
    has no engine available."""

    domains: dict[str, PoolName] = {}
    """Rollout pool of each domain; `default` is that of all others. With domains but no `default`, these go
    to the rollout pool with the most memory bandwidth for its compute, where `pools.hardware` tells. Empty:
    every domain goes anywhere."""
    declared_by: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:Class.method` of a method with `infra.affinity.hw_mapping`, whose declaration holds for
    what `domains` leaves out."""
    local_pools: dict[PoolName, str] = {}
    """Without `pools`: rollout pools on this machine, each with the hardware that it stands for, from the
    catalogue (infra/hardware.py). Engines are spread over them. Empty: one pool, `default`."""
    profile: Literal["off", "recommend", "apply"] = "off"
    """Work out from the trained trajectories which pool suits each domain, and say so (`recommend`) or bind
    new trajectories to it (`apply`). It needs the hardware of every rollout pool."""
    window: PositiveInt = 4
    """Steps whose trajectories the profile looks at."""
    gain: float = Field(default=0.1, gt=0, lt=1)
    """`apply` moves a domain only for a generation time that is shorter by at least this share ..."""
    patience: PositiveInt = 2
    """... in so many steps in a row."""

    @field_validator("local_pools")
    @classmethod
    def _hardware_is_known(cls, value: dict[str, str]) -> dict[str, str]:
        return require_known(value)

    def hardware_of(self, pool: str) -> Hardware | None:
        """Of a local pool."""
        return hardware(self.local_pools[pool]) if pool in self.local_pools else None
