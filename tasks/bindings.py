"""A run's bindings to pools, in its folder as `bindings.json`: what a resumed run keeps, and what changed.

The file is replaced whole, and goes where the run's other files go (`stores.root`).
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.resources import Binding, bindings_from_json, bindings_to_json
from tasks.report.run_files import replace_file

FILE = "bindings.json"


class BindingsDamaged(ValueError):
    """`bindings.json` cannot be read."""


class _Bound(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    requested: str
    pool: str
    reason: str


class BindingsRecord(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    bindings: list[_Bound] = []
    changes: list[dict[str, Any]] = []
    """What was re-bound while the run went on: `step`, `mapping` and `reasons`, the oldest first."""
    advice: dict[str, Any] | None = None
    """The newest advice of the affinity profile (`tasks.rollout.affinity_profile.Advice.to_json`)."""


class BindingsFile:
    """One writer at a time: the process that holds the run."""

    def __init__(self, folder: Path):
        self.path = folder / FILE

    def read(self) -> BindingsRecord:
        """Of a run that has bound nothing yet, an empty one. Raises `BindingsDamaged`."""
        if not self.path.exists():
            return BindingsRecord()
        try:
            return BindingsRecord.model_validate_json(self.path.read_bytes())
        except ValidationError as error:
            raise BindingsDamaged(
                f"{self.path} cannot be read: {error}: remove it, and the run binds its pools anew"
            ) from None

    def bindings(self, prefix: str = "") -> list[Binding]:
        """Of subjects that begin with `prefix`."""
        bound = [entry.model_dump() for entry in self.read().bindings if entry.subject.startswith(prefix)]
        return bindings_from_json(bound)

    def save(self, prefix: str, bindings: list[Binding]) -> None:
        """Put these in the place of all bindings of subjects that begin with `prefix`."""
        record = self.read()
        kept = [entry for entry in record.bindings if not entry.subject.startswith(prefix)]
        record.bindings = kept + [_Bound(**entry) for entry in bindings_to_json(bindings)]
        self._write(record)

    def append_change(self, step: int, mapping: dict[str, str], reasons: list[str]) -> None:
        record = self.read()
        record.changes.append({"step": step, "mapping": mapping, "reasons": reasons})
        self._write(record)

    def save_advice(self, advice: dict[str, Any]) -> None:
        record = self.read()
        record.advice = advice
        self._write(record)

    def _write(self, record: BindingsRecord) -> None:
        replace_file(self.path, record.model_dump_json(indent=2))
