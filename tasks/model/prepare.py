"""Prepare a campaign's model in a process of its own: `python -m tasks.model.prepare`.

It is started like a service (`infra.processes`): settings `{"campaign": {...}, "model": directory}` as one
JSON line on standard input, which then stays open as its life line. Its one line of output is the report.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from infra.processes import serve
from tasks.campaign import Campaign
from tasks.environment.rendering import ChatRenderer
from tasks.model.answer_form import measure_answer_form
from tasks.model.architecture import build_model
from tasks.model.demonstrations import EPISODES, DemonstrationError, PlayedEpisode, play, render, seeds
from tasks.model.tokenizer import build_tokenizer
from tasks.model.warm_up import warm_up

MARKER = "prepared.json"
"""Written last into a model's directory: the report. A directory built here without it is not a model."""


class ModelError(ValueError):
    """A model that cannot be used or built. The message names the option to change."""


def prepare(campaign: Campaign, target: Path, clock: Callable[[], float]) -> dict[str, Any]:
    """Check the model of `model.path`, or build one in `target` unless it is there; returns the report.

    The report has `path` (the directory to use), `parameters` and `vocabulary`; of a model built here also
    `seconds`, `warm_up_loss` (nats a response token, first and last step), `warm_up_tokens` and, by domain,
    `domains` with `valid_share` and `entropy` of sampled responses.

    `target` comes into being whole, by a rename. Raises `ModelError`, `TemplateError` or
    `DemonstrationError`.
    """
    if campaign.model.path is not None:
        return _check(campaign, Path(campaign.model.path))
    identity = _identity(campaign)
    if (target / MARKER).exists():
        report: dict[str, Any] = json.loads((target / MARKER).read_text())
        if report.pop("identity") != identity:
            raise ModelError(
                f"{target} holds a model built for another seed, model.build, model.warm_up or domains: "
                "name another run"
            )
        return {"path": str(target), **report}
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is in the way: it has files, but not the {MARKER} of a finished model")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    started = clock()
    report = _build(campaign, partial)
    report["seconds"] = clock() - started
    (partial / MARKER).write_text(json.dumps({"identity": identity, **report}, indent=2))
    os.replace(partial, target)
    return {"path": str(target), **report}


def _build(campaign: Campaign, directory: Path) -> dict[str, Any]:
    build, domains = campaign.model.build, campaign.domains
    episodes: dict[str, list[PlayedEpisode]] = {
        name: [play(name, domain, seed) for seed in islice(seeds(campaign, name), EPISODES)]
        for name, domain in domains.items()
    }
    played = [episode for of_domain in episodes.values() for episode in of_domain]
    tokenizer = build_tokenizer(
        [text for episode in played for text in episode.observations],
        [text for episode in played for text in episode.actions],
        build.vocabulary,
        build.max_context,
    )
    model = build_model(build, tokenizer, campaign.seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    report: dict[str, Any] = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "warm_up_loss": None,
        "warm_up_tokens": 0,
        "domains": {},
    }
    renderer = _renderer(campaign, directory)
    demonstrations = {}
    for name, domain in domains.items():
        rendered = [render(domain, episode, renderer, tokenizer) for episode in episodes[name]]
        demonstrations[name] = [item for item in rendered if item is not None]
        if not demonstrations[name] and any(episode.actions for episode in episodes[name]):
            raise DemonstrationError(
                f"domains.{name}: no random valid answer fits its budgets: raise max_turn_tokens "
                f"({domain.max_turn_tokens}) or max_tokens ({domain.max_tokens})"
            )
    warmed = {name: items for name, items in demonstrations.items() if items}
    if not warmed or not campaign.model.warm_up.steps:
        return report
    result = warm_up(model, warmed, campaign.model.warm_up, campaign.seed)
    model.save_pretrained(directory)
    report["warm_up_loss"] = [result.losses[0], result.losses[-1]]
    report["warm_up_tokens"] = result.trained_tokens
    for name, items in warmed.items():
        actions = [action for episode in episodes[name] for action in episode.actions]
        measured = measure_answer_form(
            model, tokenizer, items, actions, domains[name].max_turn_tokens, campaign.seed
        )
        report["domains"][name] = {"valid_share": measured.valid_share, "entropy": measured.entropy}
    return report


def _identity(campaign: Campaign) -> str:
    """A hash of what makes the model what it is."""
    domains = {name: [domain.source, domain.options] for name, domain in campaign.domains.items()}
    model = campaign.model.model_dump(mode="json")
    text = json.dumps([campaign.seed, model, domains], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _check(campaign: Campaign, path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model.path {path} has no config.json: it must be a directory in Hugging Face format"
        )
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path {path} does not load: {error}") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model.path {path}: its tokenizer has no chat template; add a chat_template.jinja")
    _renderer(campaign, path)
    if len(tokenizer) > config.vocab_size:
        raise ModelError(
            f"model.path {path}: its tokenizer has {len(tokenizer)} tokens and its embedding only "
            f"{config.vocab_size}"
        )
    context = getattr(config, "max_position_embeddings", None)
    for name, domain in campaign.domains.items():
        if context is not None and domain.max_tokens > context:
            raise ModelError(
                f"domains.{name}.max_tokens ({domain.max_tokens}) is above the context of model.path "
                f"({context}): change one of them"
            )
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return {"path": str(path), "parameters": parameters, "vocabulary": len(tokenizer)}


def _renderer(campaign: Campaign, directory: Path) -> ChatRenderer:
    """As environment workers make theirs, tried on every system prompt. Raises `TemplateError`."""
    renderer = ChatRenderer(
        directory,
        multi_turn=any(domain.max_turns > 1 for domain in campaign.domains.values()),
        options=campaign.model.chat_template_options,
    )
    for domain in campaign.domains.values():
        renderer.initial("A", domain.system_prompt)
    return renderer


async def _main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    campaign = Campaign.parse(settings["campaign"])
    clock = asyncio.get_running_loop().time
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints must not look like the report
        report = await asyncio.to_thread(prepare, campaign, Path(settings["model"]), clock)
    ready(report)


if __name__ == "__main__":
    serve(_main)
