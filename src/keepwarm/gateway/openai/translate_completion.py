"""Owns the way from a completions body (text or token ids) to a ModelCall.

Never applies a chat template. Called on a worker thread by `gateway.endpoint`.
"""

import msgspec

from keepwarm.core.errors import InvalidRequest
from keepwarm.gateway.answer import ModelCall
from keepwarm.gateway.endpoint import CallInput
from keepwarm.gateway.extensions import extras_of, hints_of, retention_of, reuse_of, salt_of, tenant_of
from keepwarm.gateway.identity import identify
from keepwarm.gateway.limits import decode_json
from keepwarm.gateway.openai.params import (
    MAX_LOGPROBS,
    for_answer,
    num_answers,
    refuse_unsupported,
    sampling_of,
    stops_of,
)
from keepwarm.gateway.openai.respond_completion import CompletionContext, StreamedCompletion, WholeCompletion
from keepwarm.gateway.openai.wire import CompletionRequest
from keepwarm.gateway.retention import cache_retention_ttl_s
from keepwarm.gateway.run import Choice
from keepwarm.gateway.sampling import MAX_INT, check_int, check_token_ids, fit_max_tokens
from keepwarm.gateway.service import GatewaySettings, ServedModel
from keepwarm.workflow.draft import Draft

DEFAULT_MAX_TOKENS = 16
"""The API's own default for this path."""

_DECODER = msgspec.json.Decoder(CompletionRequest)


def prepare_completion(call_input: CallInput) -> ModelCall:
    """Raises InvalidRequest and its kin for everything that the client must change."""
    gateway = call_input.gateway
    request = decode_json(_DECODER, call_input.body)
    served = gateway.find_model(request.model)
    refuse_unsupported(request)
    if request.best_of not in (None, 1):
        raise InvalidRequest("'best_of' must be 1 or left out. Use 'n' for several answers.", param="best_of")
    num_logprobs = check_int("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.echo and num_logprobs is not None:
        raise InvalidRequest(
            "'echo' with 'logprobs' is not supported: log-probabilities of the prompt are not computed. "
            "Leave one out.",
            param="echo",
        )
    n = num_answers(request, gateway.settings.max_n)
    wish = retention_of(
        (), request.nvext, request.keepwarm, cache_retention_ttl_s(request.prompt_cache_retention)
    )
    prompts = prompts_of(request, served, gateway.settings)
    if len(prompts) * n > gateway.settings.max_choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} answers; the most in one call is "
            f"{gateway.settings.max_choices}. Split the call.",
            param="prompt",
        )
    asked = check_int("max_tokens", request.max_tokens, 1, MAX_INT) or DEFAULT_MAX_TOKENS
    stop = stops_of(request)
    identity = identify(call_input.headers, prompt_cache_key=request.prompt_cache_key)
    choices: list[Choice] = []
    for prompt_index, token_ids in enumerate(prompts):
        max_tokens = fit_max_tokens("prompt", len(token_ids), asked, served.info)
        sampling = sampling_of(request, served, max_tokens=max_tokens, num_logprobs=num_logprobs)
        for answer in range(n):
            draft = Draft(
                model=served.name,
                token_ids=token_ids,
                sampling=for_answer(sampling, answer),
                identity=identity,
                tenant_id=tenant_of(call_input.headers),
                cache_salt=salt_of(call_input.headers, request.nvext, request.cache_salt),
                hints=hints_of(request.nvext, request.keepwarm),
                reuse=reuse_of(request.keepwarm),
                retention=wish,
            )
            reader = served.text.start_turn(stop=stop, parse_tools=False)
            choices.append(Choice(len(choices), prompt_index, draft, reader))
    context = CompletionContext(
        completion_id=gateway.new_id("cmpl-"),
        created_s=int(gateway.wall_s()),
        model=request.model,
        text=served.text,
        with_logprobs=num_logprobs is not None,
        extras=extras_of(call_input.headers, request.nvext, request.keepwarm),
        request_id=call_input.request_id,
        echoes=tuple(
            served.text.decode(choice.draft.token_ids) if request.echo else "" for choice in choices
        ),
    )
    if request.stream:
        options = request.stream_options
        include_usage = options is not None and options.include_usage is True
        return ModelCall(served, tuple(choices), StreamedCompletion(context, include_usage=include_usage))
    return ModelCall(served, tuple(choices), WholeCompletion(context))


def prompts_of(
    request: CompletionRequest, served: ServedModel, settings: GatewaySettings
) -> list[tuple[int, ...]]:
    """The prompts as token ids: one for a text or a list of ids, several for a list of either."""
    given = request.prompt
    if isinstance(given, str):
        return [_encoded(served, given)]
    if not given:
        raise InvalidRequest("'prompt' is an empty list. Send a text or token ids.", param="prompt")
    ids = [item for item in given if isinstance(item, int)]
    texts = [item for item in given if isinstance(item, str)]
    lists = [item for item in given if isinstance(item, list)]
    if len(given) not in (len(ids), len(texts), len(lists)):
        raise InvalidRequest("'prompt' mixes texts and token ids. Send one kind in a call.", param="prompt")
    if texts:
        return [_encoded(served, text) for text in texts]
    if not settings.allow_token_ids:
        raise InvalidRequest("This server takes no token ids as a prompt. Send text.", param="prompt")
    prompts = [check_token_ids("prompt", item, served.info) for item in lists or [ids]]
    if not all(prompts):
        raise InvalidRequest("'prompt' holds an empty list of token ids. Send at least one.", param="prompt")
    return prompts


def _encoded(served: ServedModel, text: str) -> tuple[int, ...]:
    token_ids = served.text.encode(text, add_special=True)
    if not token_ids:
        raise InvalidRequest("'prompt' is empty. Send at least one character.", param="prompt")
    return token_ids
