"""Owns finding the cache marks of a Messages body.

Never judges a mark (see `gateway.retention`). Called by `anthropic.translate`.
"""

from collections.abc import Sequence

from keepwarm.gateway.anthropic.wire import Block, MessagesRequest
from keepwarm.gateway.retention import CacheMark, marks_at


def cache_marks(request: MessagesRequest) -> list[CacheMark]:
    """All marks, in the order of the prompt: tools, system, messages with what they nest, then the body's own.

    The body's own mark stands for the last block, so it counts as one of the marks.
    """
    marks = marks_at("tools", (tool.cache_control for tool in request.tools or ()))
    marks += _of_content("system", request.system)
    for index, message in enumerate(request.messages):
        marks += _of_content(f"messages[{index}].content", message.content)
    if request.cache_control is not None:
        marks.append(CacheMark("cache_control", request.cache_control))
    return marks


def _of_content(place: str, content: str | Sequence[Block] | None) -> list[CacheMark]:
    if content is None or isinstance(content, str):
        return []
    marks: list[CacheMark] = []
    for index, block in enumerate(content):
        if isinstance(block.content, list):
            marks += _of_content(f"{place}[{index}].content", block.content)
        if block.cache_control is not None:
            marks.append(CacheMark(f"{place}[{index}].cache_control", block.cache_control))
    return marks
