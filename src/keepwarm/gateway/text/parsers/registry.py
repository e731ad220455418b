"""Owns the names of the tool formats and the choice of one for a model.

A format is a name, a maker of parsers, and whether Keepwarm may teach it to a model whose own template
knows no tools. Called by `model`. To add one: write a parser that keeps the laws of `base`, name it here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from keepwarm.core.errors import ConfigurationError
from keepwarm.gateway.text.parsers.base import CallIds, ToolParser
from keepwarm.gateway.text.parsers.hermes import CLOSE, OPEN, HermesParser
from keepwarm.gateway.text.parsers.plain import PlainParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    make_parser: Callable[[CallIds], ToolParser]
    markers: frozenset[str] = frozenset()
    """Texts that the parser must see even where a model has them as special tokens."""
    teachable: bool = False
    """Whether the tool preamble of `tool_prompt` describes this format."""


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("hermes", HermesParser, frozenset({OPEN, CLOSE}), teachable=True),
        "plain": ToolFormat("plain", lambda call_ids: PlainParser()),
    }
)


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises `ConfigurationError` naming the known ones."""
    try:
        return TOOL_FORMATS[name]
    except KeyError:
        known = ", ".join(sorted(TOOL_FORMATS))
        raise ConfigurationError(f"there is no tool format {name!r}. Choose one of: {known}.") from None


def choose_tool_format(template_source: str | None, *, renders_tools: bool) -> ToolFormat:
    """The format that a model's template implies.

    A template without tools gets `hermes`, which the preamble then teaches. A template with tools of its own
    gets `hermes` when it writes that marker, else `plain`: an unknown format is shown and never guessed.
    """
    if renders_tools and OPEN not in (template_source or ""):
        return TOOL_FORMATS["plain"]
    return TOOL_FORMATS["hermes"]
