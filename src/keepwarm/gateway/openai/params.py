"""Owns turning the sampling fields that both OpenAI paths share into SamplingParams, with their ranges.

Never touches messages or prompts. Called by `translate_chat` and `translate_completion`.

| field | range | when left out |
|---|---|---|
| n | 1 to the server's limit | 1 |
| max_tokens, max_completion_tokens | 1 to 2^31-1, clipped to the room left | chat: all; completions: 16 |
| min_tokens | 0 to max_tokens | 0 |
| temperature | 0 to 2 | 1 |
| top_p | above 0 to 1 | 1 |
| top_k | -1 or 0 (all) to 2^31-1 | 0 |
| min_p | 0 to 1 | 0 |
| presence_penalty, frequency_penalty | -2 to 2 | 0 |
| repetition_penalty | above 0 to 10 | 1 |
| seed | 64-bit integer | none |
| stop | at most 64 strings of 1 to 1024 characters | none |
| logprobs, top_logprobs | 0 to 20 | none |
"""

from dataclasses import replace

from keepwarm.core.errors import InvalidRequest
from keepwarm.core.request import SamplingParams
from keepwarm.gateway.openai.wire import UNSUPPORTED_FIELDS, SamplingFields
from keepwarm.gateway.sampling import (
    MAX_INT,
    MAX_STOPS,
    check_float,
    check_int,
    check_stops,
    check_token_ids,
    derived_seed,
)
from keepwarm.gateway.service import ServedModel

MAX_LOGPROBS = 20


def refuse_unsupported(request: SamplingFields) -> None:
    """Raise InvalidRequest for a field that is known, asks for something, and cannot be honoured."""
    for name in UNSUPPORTED_FIELDS:
        if getattr(request, name, None):
            raise InvalidRequest(f"'{name}' is not supported yet. Leave it out.", param=name)
    wanted = request.response_format
    if wanted is not None and wanted.type != "text":
        raise InvalidRequest(
            f"response_format '{wanted.type[:40]}' is not supported yet; only 'text' is. Leave it out, and "
            "ask for the form in the prompt.",
            param="response_format",
        )


def sampling_of(
    request: SamplingFields, served: ServedModel, *, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    """The checked parameters of the request's first answer. `max_tokens` already fits the window."""
    info = served.info
    if (
        request.min_tokens is not None
        and request.max_tokens is not None
        and request.min_tokens > request.max_tokens
    ):
        raise InvalidRequest(
            f"'min_tokens' ({request.min_tokens}) is above 'max_tokens' ({request.max_tokens}). Lower it.",
            param="min_tokens",
        )
    given_ids = request.stop_token_ids or []
    if len(given_ids) > MAX_STOPS:
        raise InvalidRequest(
            f"'stop_token_ids' has {len(given_ids)} entries; the most is {MAX_STOPS}.", param="stop_token_ids"
        )
    stop_ids = check_token_ids("stop_token_ids", given_ids, info)
    if not request.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*served.text.eos_token_ids, *stop_ids)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(check_int("min_tokens", request.min_tokens, 0, MAX_INT) or 0, max_tokens),
        temperature=_or(check_float("temperature", request.temperature, 0, 2), 1.0),
        top_p=_or(check_float("top_p", request.top_p, 0, 1, low_excluded=True), 1.0),
        top_k=max(0, check_int("top_k", request.top_k, -1, MAX_INT) or 0),
        min_p=_or(check_float("min_p", request.min_p, 0, 1), 0.0),
        presence_penalty=_or(check_float("presence_penalty", request.presence_penalty, -2, 2), 0.0),
        frequency_penalty=_or(check_float("frequency_penalty", request.frequency_penalty, -2, 2), 0.0),
        repetition_penalty=_or(
            check_float("repetition_penalty", request.repetition_penalty, 0, 10, low_excluded=True), 1.0
        ),
        seed=check_int("seed", request.seed, -(2**63), 2**63 - 1),
        stop_token_ids=stop_ids,
        num_logprobs=num_logprobs,
    )


def for_answer(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer number `index` to the same prompt: only its seed differs."""
    return replace(sampling, seed=derived_seed(sampling.seed, index))


def stops_of(request: SamplingFields) -> tuple[str, ...]:
    stop = request.stop
    return check_stops("stop", [stop] if isinstance(stop, str) else stop or [])


def num_answers(request: SamplingFields, max_n: int) -> int:
    n = check_int("n", request.n, 1, max_n)
    return 1 if n is None else n


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
