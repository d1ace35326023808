"""Calibrations as they are kept: coefficients by name, what they were fitted on, and their residuals."""

from pathlib import Path
from typing import Self

from infra.config import Config
from infra.hardware import plain_name
from infra.performance.host_costs import HostCosts

FOLDER = Path(__file__).parent / "calibrations"


class UnknownCalibration(ValueError):
    """There is no such file, and none of this name is committed."""


class Residual(Config):
    """Relative errors of the predictions on what was fitted, |predicted / measured - 1|."""

    count: int
    median: float
    p90: float
    """Nine in ten are smaller."""


class Fitted(Config):
    """Of one hardware. What is not named keeps the catalogue's figure."""

    iteration: dict[str, float] = {}
    """Fitted fields of `IterationCoefficients`."""
    training: dict[str, float] = {}
    """Fitted fields of `TrainingCoefficients`."""
    residuals: dict[str, Residual] = {}


class Calibration(Config):
    """Coefficients fitted on one set of measurements."""

    name: str
    fitted_on: str
    """Which measurements, and how."""
    hardware: dict[str, Fitted]
    """By the hardware's name in the catalogue."""
    host: HostCosts | None = None
    """Of a machine whose cores everything shares. Empty: what is around engines and trainer costs no time."""

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.model_validate_json(path.read_text())

    @classmethod
    def named(cls, name: str | Path) -> Self:
        """A committed one by its name, or any by its file. Raises `UnknownCalibration`."""
        for path in (Path(name), FOLDER / f"{name}.json"):
            if path.is_file():
                return cls.load(path)
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise UnknownCalibration(f"there is no calibration {str(name)!r}: neither a file nor one of {known}")

    def of(self, hardware: str) -> Fitted:
        """Nothing where the hardware is not among the measured."""
        return self.hardware.get(plain_name(hardware), Fitted())

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n")
