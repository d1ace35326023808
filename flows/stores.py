"""The stores of a campaign come within reach: the block that it names is opened, and each URL answers."""

from typing import Any

from blocks.saved import ObjectStoreBlock
from infra.object_store import ObjectStore
from tasks.campaign import Campaign, CampaignError


def reach_stores(campaign: Campaign) -> None:
    """Open `stores.block` for this process and its children, and ask every remote store for an answer.

    Raises `CampaignError` that names the option to change.
    """
    stores = campaign.stores
    if stores.block is not None:
        _lend(stores.block, {url.partition("://")[0] for url in stores.urls.values() if "://" in url})
    for option, url in stores.urls.items():
        _reach(option, url)


def _lend(name: str, protocols: set[str]) -> None:
    try:
        # Prefect's type of `load` does not say that `_sync` makes it an ordinary call, on a running loop too.
        load: Any = ObjectStoreBlock.load
        block: ObjectStoreBlock = load(name, _sync=True)
    except ValueError as error:
        raise CampaignError(
            f'stores.block: Prefect has no block "Tutti object store" named {name!r}: save one in the '
            f"dashboard, or in Python by ObjectStoreBlock(...).save({name!r}) ({error})"
        ) from None
    protocol = block.url.partition("://")[0]
    if protocol not in protocols:
        raise CampaignError(
            f"stores.block: the block {name!r} opens {protocol} URLs, and the stores of this campaign are "
            f"{', '.join(sorted(protocols))}: name another block, or change stores.root"
        )
    block.lend()


def _reach(option: str, url: str) -> None:
    if url.partition("://")[0] in ("mooncake", url):  # a local directory, or opened by its own client
        return
    try:
        ObjectStore(url).exists("campaign.yaml")
    except ImportError as error:
        raise CampaignError(f"stores.{option}: {url} needs a package: {error} (for S3: tutti[s3])") from None
    except Exception as error:  # each file system has errors of its own
        raise CampaignError(
            f"stores.{option}: {url} does not answer ({type(error).__name__}: {error}): check the URL "
            "and the credentials, in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_ENDPOINT_URL) or in the block of stores.block"
        ) from None
