"""Where environments come from: a registered source by name, or a class of the user's own."""

import importlib
from typing import Any

from tasks.environment.sources.base import Environment

SOURCES = {
    "agent": "tasks.environment.sources.agent:AgentEnvironment",
    "gymnasium": "tasks.environment.sources.gymnasium:make",
    "gem": "tasks.environment.sources.gem:GemEnvironment",
    "reasoning_gym": "tasks.environment.sources.reasoning_gym:ReasoningGymEnvironment",
}


class SourceError(ValueError):
    """An environment that cannot be made; the message names `source` or `options` of the domain."""


def make(source: str, options: dict[str, Any]) -> Environment:
    """A new environment of a registered source, or of `package.module:Class`, called with `options`.

    Imports what it needs on first use, so that a process pays only for the libraries its domains name.
    Raises `SourceError` when there is no such source or it does not take these options.
    """
    target = SOURCES.get(source, source)
    module_name, separator, attribute = target.partition(":")
    if not separator:
        raise SourceError(
            f"source {source!r} is neither one of {sorted(SOURCES)} nor of the form package.module:Class"
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        hint = "; install tutti[environments]" if source in SOURCES else ""
        raise SourceError(f"source {source!r}: {error}{hint}") from error
    except AttributeError as error:
        raise SourceError(f"source {source!r}: {error}") from error
    try:
        environment: Environment = factory(**options)
    except (TypeError, ValueError) as error:
        raise SourceError(f"source {source!r} does not take options {options}: {error}") from error
    return environment
