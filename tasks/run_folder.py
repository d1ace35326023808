"""Where the files of a run lie."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from infra.folder_mirror import FolderMirror
from infra.object_store import ObjectStore, is_key
from tasks.campaign import Campaign, CampaignError

_STORES = frozenset({"samples", "weights", "checkpoints"})


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The local folder of a run, and the URLs of its stores: inside of it unless the campaign moves them.

    With `stores.root` the folder is a working copy: what it holds is uploaded to `files_url` while the run
    goes on, and fetched from there where it is missing or older.
    """

    root: Path
    model: Path  # in Hugging Face format: the campaign's own, or the one built in the folder
    samples_url: str
    weights_url: str
    checkpoints_url: str
    files_url: str | None = None  # where the folder's files are uploaded; None keeps them here
    upload_every_s: float = 10

    @classmethod
    def of(cls, campaign: Campaign, run: str) -> "RunFolder":
        """Raises `CampaignError` when `run` is no plain name: it becomes part of paths, URLs and keys."""
        if "/" in run or not is_key(run):
            raise CampaignError(
                f"{run!r} cannot name a run: take letters, digits and _.=+@,- starting with a letter, a "
                "digit or _"
            )
        stores = campaign.stores
        root = Path(stores.runs).resolve() / run
        base = _join(stores.root, run) if stores.root else str(root)

        def url(configured: str | None, name: str) -> str:
            return f"{_join(configured, run)}/{name}" if configured else f"{base}/{name}"

        return cls(
            root,
            Path(campaign.model.path).resolve() if campaign.model.path else root / "model",
            url(stores.samples, "samples"),
            url(stores.weights, "weights"),
            url(stores.checkpoints, "checkpoints"),
            base if stores.root else None,
            stores.upload_every_s,
        )

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def campaign_file(self) -> Path:
        return self.root / "campaign.yaml"

    @property
    def location(self) -> str:
        """Where a person finds the run."""
        return self.files_url or str(self.root)

    def exists(self) -> bool:
        """Whether the run has begun, here or in its store."""
        return self.campaign_file.exists() or (
            self.files_url is not None and ObjectStore(self.files_url).exists(self.campaign_file.name)
        )

    def begin(self, campaign: Campaign, *, resume: bool) -> None:
        """Create the folder and save the campaign in it, or fetch what another machine did of the run.

        Raises `CampaignError` rather than mix two runs.
        """
        exists = self.exists()
        if exists and not resume:
            raise CampaignError(f"run {self.name} exists in {self._parent}: resume it, or name another run")
        if not exists and resume:
            raise CampaignError(f"there is no run {self.name} in {self._parent} to resume")
        self.logs.mkdir(parents=True, exist_ok=True)
        mirror = self._mirror()
        if mirror is not None and resume:
            mirror.restore()
        if self.campaign_file.exists():
            return
        text = campaign.dump()
        if self.files_url is not None:
            store = ObjectStore(self.files_url)
            store.create(self.campaign_file.name, text.encode())
            standing = store.get(self.campaign_file.name).decode()
            if standing != text and not resume:
                raise CampaignError(
                    f"run {self.name} was just begun in {self._parent} by another: name another run"
                )
            text = standing
        self.campaign_file.write_text(text)

    @asynccontextmanager
    async def uploaded(self) -> AsyncIterator[None]:
        """Upload the folder's files in the background, and their last state at the end.

        For the one who holds the run's lease. Nothing happens without `stores.root`.
        """
        mirror = self._mirror()
        if mirror is None:
            yield
            return
        async with mirror.following(self.upload_every_s):
            yield

    def upload(self, only: tuple[str, ...] | None = None) -> None:
        """Upload at once what changed, or these files of it. Nothing happens without `stores.root`."""
        mirror = self._mirror()
        if mirror is not None:
            mirror.push(only=only)

    @property
    def _parent(self) -> str:
        return self.location.rpartition("/")[0]

    def _mirror(self) -> FolderMirror | None:
        return None if self.files_url is None else _mirror_of(self.root, self.files_url)


@cache
def _mirror_of(folder: Path, url: str) -> FolderMirror:
    """One a run and process: it knows what it has uploaded."""
    return FolderMirror(folder, ObjectStore(url), skip=_STORES)


def _join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"
