import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tasks.campaign import Campaign
from tasks.environment.sources import make
from tasks.model.demonstrations import PlayedEpisode
from tasks.model.tokenizer import SMALLEST_VOCABULARY, SPECIAL_TOKENS, build_tokenizer
from tests.model.conftest import texts_and_actions

UNSEEN_SEEDS = range(2_000_000, 2_000_050)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(directory)


class TestAnyText:
    @given(text=st.text())
    def test_decodes_to_itself(self, loaded: PreTrainedTokenizerFast, text: str) -> None:
        assert loaded.decode(loaded.encode(text)) == text

    @given(
        parts=st.lists(st.sampled_from(["row ", "1", " column ", "<|eos|>", "\\boxed{", "}", "\n", " ", "é"]))
    )
    def test_decodes_to_itself_where_it_resembles_what_was_learned(
        self, loaded: PreTrainedTokenizerFast, parts: list[str]
    ) -> None:
        text = "".join(parts)
        assert loaded.decode(loaded.encode(text)) == text
        assert loaded.decode(loaded.encode(text, split_special_tokens=True)) == text

    @given(number=st.integers(min_value=0))
    def test_has_one_token_a_digit(self, loaded: PreTrainedTokenizerFast, number: int) -> None:
        text = f"is {number} lower than {number}?"
        digits = [token for token in loaded.tokenize(text) if re.search("[0-9]", token)]
        assert digits == list(str(number) * 2)

    def test_cannot_smuggle_in_an_end_token_when_special_tokens_are_split(
        self, loaded: PreTrainedTokenizerFast
    ) -> None:
        assert loaded.eos_token_id in loaded.encode("<|eos|>")
        assert loaded.eos_token_id not in loaded.encode("<|eos|>", split_special_tokens=True)


class TestBudgets:
    @pytest.mark.parametrize(("domain", "limit"), [("guess", 20), ("sums", 6), ("lake", 10)])
    def test_first_prompts_of_unseen_seeds_are_short(
        self, campaign: Campaign, loaded: PreTrainedTokenizerFast, domain: str, limit: int
    ) -> None:
        config = campaign.domains[domain]
        for seed in UNSEEN_SEEDS:
            environment = make(config.source, config.options)
            assert len(loaded.encode(environment.reset(seed))) <= limit
            environment.close()

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("row 2 column 3", 4),
            ("left", 1),
            ("down", 1),
            ("right", 1),
            ("up", 1),
            ("\\boxed{7}", 3),
            ("\\boxed{10}", 4),
            ("-8", 2),
            ("17", 2),
            ("At turn 2, you guessed 7, and the target number is lower than 7.\nEnter your next guess.", 8),
        ],
    )
    def test_turns_and_actions_are_short(
        self, loaded: PreTrainedTokenizerFast, text: str, tokens: int
    ) -> None:
        assert len(loaded.encode(text)) == tokens

    def test_a_lake_turn_in_a_conversation_adds_six_tokens_beside_the_answer(
        self, loaded: PreTrainedTokenizerFast
    ) -> None:
        turn = [{"role": "user", "content": "row 2 column 3"}]
        ids = loaded.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        assert len(ids) == 6


class TestVocabulary:
    @pytest.mark.parametrize("limit", [SMALLEST_VOCABULARY, SMALLEST_VOCABULARY + 8, 280])
    def test_is_bounded_and_keeps_every_byte(
        self, episodes: dict[str, list[PlayedEpisode]], limit: int
    ) -> None:
        tokenizer = build_tokenizer(*texts_and_actions(episodes), vocabulary=limit, max_context=512)
        assert len(tokenizer) == limit
        everything = bytes(range(256)).decode("latin-1") + "\U0001f9ca"
        assert tokenizer.decode(tokenizer.encode(everything)) == everything

    def test_spends_a_small_budget_on_what_saves_most(self, episodes: dict[str, list[PlayedEpisode]]) -> None:
        texts, actions = texts_and_actions(episodes)
        counts = []
        for limit in (SMALLEST_VOCABULARY, 270, 280, 1024):
            tokenizer = build_tokenizer(texts, actions, vocabulary=limit, max_context=512)
            counts.append(sum(len(tokenizer.encode(text)) for text in texts))
        assert counts == sorted(counts, reverse=True)
        assert counts[1] < counts[0] / 2

    def test_too_small_a_limit_names_the_option(self) -> None:
        with pytest.raises(ValueError, match=r"model\.build\.vocabulary \(260\) must be at least 261"):
            build_tokenizer(["text"], [], vocabulary=260, max_context=512)

    def test_special_tokens_differ(self, loaded: PreTrainedTokenizerFast) -> None:
        ids = loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        assert len(set(ids)) == len(SPECIAL_TOKENS)
        assert {loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id} < set(ids)

    def test_the_same_texts_give_the_same_tokenizer(
        self, tokenizer: PreTrainedTokenizerFast, episodes: dict[str, list[PlayedEpisode]]
    ) -> None:
        again = build_tokenizer(*texts_and_actions(episodes), vocabulary=1024, max_context=512)
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


class TestChatTemplate:
    @given(contents=st.lists(st.text(), min_size=2, max_size=6))
    def test_a_conversation_is_a_prefix_of_every_longer_one(
        self, loaded: PreTrainedTokenizerFast, contents: list[str]
    ) -> None:
        messages = [
            {"role": ("user", "assistant")[index % 2], "content": content}
            for index, content in enumerate(contents)
        ]
        rendered = [
            loaded.apply_chat_template(messages[:length], return_dict=False)
            for length in range(1, len(messages) + 1)
        ]
        for shorter, longer in pairwise(rendered):
            assert longer[: len(shorter)] == shorter

    def test_other_roles_are_refused(self, loaded: PreTrainedTokenizerFast) -> None:
        with pytest.raises(Exception, match="roles user and assistant only"):
            loaded.apply_chat_template([{"role": "tool", "content": ""}])
