"""Owns what OpenAI clients read about an answer: usage, finish reason, log-probabilities.

Never holds state. Called by the two `respond_*` modules.
"""

from collections.abc import Sequence

from keepwarm.core.events import SampledToken
from keepwarm.core.request import FinishReason
from keepwarm.gateway.answer import UsageSum
from keepwarm.gateway.openai.wire import PromptTokensDetails, TokenLogprobOut, TopLogprob, UsageOut
from keepwarm.gateway.text.model import TextModel

_LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; the API itself uses this number."""


def usage_out(usage: UsageSum) -> UsageOut:
    return UsageOut(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.num_cached_tokens),
    )


def finish_name(reason: FinishReason, *, has_calls: bool) -> str:
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def finite_logprob(logprob: float | None) -> float:
    return max(logprob, _LEAST_LOGPROB) if logprob is not None else _LEAST_LOGPROB


def logprobs_out(text: TextModel, tokens: Sequence[SampledToken]) -> list[TokenLogprobOut]:
    return [
        TokenLogprobOut(
            text.token_text(token.token_id),
            finite_logprob(token.logprob),
            list(text.token_bytes(token.token_id)),
            [
                TopLogprob(
                    text.token_text(top.token_id),
                    finite_logprob(top.logprob),
                    list(text.token_bytes(top.token_id)),
                )
                for top in token.top
            ],
        )
        for token in tokens
    ]
