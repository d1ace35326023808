"""One campaign of three domains, and what is learned of them, for all tests of the small policy."""

from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tasks.campaign import Campaign
from tasks.environment.rendering import ChatRenderer
from tasks.model.architecture import build_model
from tasks.model.demonstrations import PlayedEpisode, play, seeds
from tasks.model.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def campaign() -> Campaign:
    return Campaign.parse(
        {
            "name": "small",
            "seed": 3,
            "domains": {
                "lake": {
                    "source": "gymnasium",
                    "options": {"id": "FrozenLake-v1", "map_name": "4x4", "is_slippery": False},
                    "max_turns": 16,
                    "max_turn_tokens": 4,
                    "max_tokens": 256,
                },
                "guess": {
                    "source": "gem",
                    "options": {"id": "game:GuessTheNumber-v0-easy"},
                    "max_turns": 4,
                    "max_turn_tokens": 6,
                    "max_tokens": 256,
                },
                "sums": {
                    "source": "reasoning_gym",
                    "options": {
                        "dataset": "chain_sum",
                        "min_terms": 2,
                        "max_terms": 2,
                        "min_digits": 1,
                        "max_digits": 1,
                    },
                    "max_turn_tokens": 6,
                    "max_tokens": 64,
                },
            },
        }
    )


@pytest.fixture(scope="session")
def episodes(campaign: Campaign) -> dict[str, list[PlayedEpisode]]:
    return {
        name: [play(name, domain, seed) for seed in islice(seeds(campaign, name), 64)]
        for name, domain in campaign.domains.items()
    }


@pytest.fixture(scope="session")
def tokenizer(episodes: dict[str, list[PlayedEpisode]]) -> PreTrainedTokenizerFast:
    return build_tokenizer(*texts_and_actions(episodes), vocabulary=1024, max_context=512)


@pytest.fixture(scope="session")
def directory(
    campaign: Campaign, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Tokenizer and untrained model, as `ChatRenderer` and the engines load them."""
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    build_model(campaign.model.build, tokenizer, campaign.seed).save_pretrained(path)
    return path


@pytest.fixture
def renderer(directory: Path) -> ChatRenderer:
    return ChatRenderer(directory)


def texts_and_actions(episodes: dict[str, list[PlayedEpisode]]) -> tuple[list[str], list[str]]:
    played = [episode for of_domain in episodes.values() for episode in of_domain]
    return (
        [text for episode in played for text in episode.observations],
        [text for episode in played for text in episode.actions],
    )
