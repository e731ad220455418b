"""Owns checking numbers that clients send, and fitting an answer into the model's window.

Never reads a wire type. Called by both dialects' `translate`. Every refusal states the range and the value.
"""

import math
from collections.abc import Sequence

from keepwarm.core.errors import ContextTooLong, InvalidRequest
from keepwarm.engine.executor import ModelInfo

MAX_INT = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


def check_int(name: str, value: int | None, low: int, high: int) -> int | None:
    """`value` if it is None or in [low, high]. Raises InvalidRequest."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be from {low} to {high}; got {_short(value)}.", param=name)
    return value


def check_float(
    name: str, value: float | None, low: float, high: float, *, low_excluded: bool = False
) -> float | None:
    """`value` if it is None or in [low, high]. Raises InvalidRequest."""
    if value is None:
        return None
    if not math.isfinite(value) or not low <= value <= high or (low_excluded and value == low):
        start = f"above {low:g}" if low_excluded else f"from {low:g}"
        raise InvalidRequest(f"'{name}' must be {start} to {high:g}; got {_short(value)}.", param=name)
    return value


def check_stops(name: str, stops: Sequence[str]) -> tuple[str, ...]:
    """Stop strings, without repeats. Raises InvalidRequest for too many, too long or empty ones."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'{name}' has {len(stops)} entries; the most is {MAX_STOPS}.", param=name)
    for stop in stops:
        if not stop:
            raise InvalidRequest(
                f"'{name}' holds an empty string, which would stop at once. Leave it out.", param=name
            )
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"'{name}' holds a string of {len(stop)} characters; the most is {MAX_STOP_CHARS}.",
                param=name,
            )
    return tuple(dict.fromkeys(stops))


def check_token_ids(name: str, token_ids: Sequence[int], info: ModelInfo) -> tuple[int, ...]:
    """Token ids inside the vocabulary. Raises InvalidRequest, which names the first that is not."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequest(
                f"'{name}' has token id {_short(token_id)} at position {position}; "
                f"this model's ids are 0 to {info.vocab_size - 1}.",
                param=name,
            )
    return tuple(token_ids)


def fit_max_tokens(param: str, num_prompt_tokens: int, asked: int | None, info: ModelInfo) -> int:
    """How many tokens may be generated: what was asked for, at most what the window has left.

    Coding agents ask for 32,000 tokens of any model, so a large wish is clipped, never refused; only a
    prompt that leaves no room for one token is an error. Raises ContextTooLong.
    """
    room = info.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"The prompt has {num_prompt_tokens} tokens, but this model's context is {info.max_model_len} "
            "tokens, one of which the answer needs. Shorten the prompt.",
            param=param,
        )
    return room if asked is None else min(asked, room)


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of answer number `index`: answers differ from each other, and repeat from call to call."""
    return None if seed is None else (seed + index) & (2**63 - 1)


def _short(value: int | float) -> str:
    # A client may send a number of thousands of digits.
    return (
        f"{value:.6g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "a huge number"
    )
