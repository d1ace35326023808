"""Where the files of a run lie."""

from dataclasses import dataclass
from pathlib import Path

from tasks.campaign import Campaign, CampaignError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The local folder of a run, and the URLs of its stores: inside of it unless the campaign moves them."""

    root: Path
    model: Path  # in Hugging Face format: the campaign's own, or the one built in the folder
    samples_url: str
    weights_url: str
    checkpoints_url: str

    @classmethod
    def of(cls, campaign: Campaign, run: str) -> "RunFolder":
        root = Path(campaign.stores.runs).resolve() / run

        def url(configured: str | None, name: str) -> str:
            return f"{configured.rstrip('/')}/{run}/{name}" if configured else str(root / name)

        stores = campaign.stores
        return cls(
            root,
            Path(campaign.model.path).resolve() if campaign.model.path else root / "model",
            url(stores.samples, "samples"),
            url(stores.weights, "weights"),
            url(stores.checkpoints, "checkpoints"),
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

    def begin(self, campaign: Campaign, *, resume: bool) -> None:
        """Create the folder and save the campaign in it. Raises `CampaignError` rather than mix two runs."""
        if self.campaign_file.exists() and not resume:
            raise CampaignError(
                f"run {self.name} exists in {self.root.parent}: resume it, or name another run"
            )
        if not self.campaign_file.exists() and resume:
            raise CampaignError(f"there is no run {self.name} in {self.root.parent} to resume")
        self.logs.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.campaign_file.write_text(campaign.dump())
