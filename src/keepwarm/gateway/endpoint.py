"""Owns one model call over HTTP, for every dialect: read, prepare, run, answer whole or as a stream.

Never knows a wire format: a dialect hands in `prepare` and gets its answer object driven. Routed to by
`gateway.app`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from keepwarm.core.errors import KeepwarmError, Overloaded
from keepwarm.core.request import FinishReason
from keepwarm.gateway.answer import ModelCall, StreamedAnswer, WholeAnswer
from keepwarm.gateway.disconnect import ClientDisconnected, while_connected
from keepwarm.gateway.limits import nested_too_deeply, read_body
from keepwarm.gateway.record import CallRecord
from keepwarm.gateway.run import ChoiceDelta, ChoiceEvent, Sink, run_choices
from keepwarm.gateway.service import Gateway
from keepwarm.gateway.sse import EventStream, with_keep_alive
from keepwarm.observe.logs import log_crash


@dataclass(frozen=True, slots=True)
class CallInput:
    """What a dialect needs to prepare a call."""

    gateway: Gateway
    headers: Headers
    body: bytes
    request_id: str


Prepare = Callable[[CallInput], ModelCall]
T = TypeVar("T")


async def prepare_in_thread(prepare: Callable[[CallInput], T], call_input: CallInput) -> T:
    """Run `prepare` off the event loop: a long prompt takes long to tokenise, and other streams must flow."""
    try:
        return await anyio.to_thread.run_sync(prepare, call_input)
    except RecursionError:
        # Rendering walks nested tool schemas and arguments further than decoding them did.
        raise nested_too_deeply() from None


class ModelEndpoint:
    """ASGI application of one inference path."""

    def __init__(self, gateway: Gateway, prepare: Prepare) -> None:
        self._gateway = gateway
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = CallRecord.of(scope)
        headers = Headers(scope=scope)
        self._check_open()
        body = await read_body(headers, receive, self._gateway.settings.max_body_bytes)
        call_input = CallInput(self._gateway, headers, body, record.request_id)
        await while_connected(receive, lambda: self._serve(call_input, record, send))

    def _check_open(self) -> None:
        source, wait_s = self._gateway.source, self._gateway.settings.retry_after_s
        if source.is_draining:
            raise Overloaded(
                "The server is shutting down. Send the request to another one.", retry_after_s=wait_s
            )
        if not source.health():
            raise Overloaded(
                "The server is not ready yet. Send the request again in a moment.", retry_after_s=wait_s
            )

    async def _serve(self, call_input: CallInput, record: CallRecord, send: Send) -> None:
        call = await prepare_in_thread(self._prepare, call_input)
        model = call.served.name
        record.model = model
        record.harness = call.choices[0].draft.identity.harness
        record.is_streamed = isinstance(call.answer, StreamedAnswer)
        metrics = self._gateway.metrics
        metrics.on_call_started(model)
        completed = False
        try:
            if isinstance(call.answer, StreamedAnswer):
                completed = await self._stream(call, call.answer, record, send)
            else:
                await self._answer_whole(call, call.answer, record, send)
                completed = True
        except (ClientDisconnected, anyio.get_cancelled_exc_class()):
            metrics.on_disconnect(model)
            raise
        finally:
            metrics.on_call_ended(model, self._gateway.now_s() - record.started_s, completed=completed)

    async def _answer_whole(
        self, call: ModelCall, answer: WholeAnswer, record: CallRecord, send: Send
    ) -> None:
        async def sink(event: ChoiceEvent) -> None:
            self._account(event, call, record)
            answer.on_event(event)

        await self._run(call, sink)
        body = answer.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        # From here on the answer is given: a client that has read it and hangs up has not cancelled anything.
        with anyio.CancelScope(shield=True):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: ModelCall, answer: StreamedAnswer, record: CallRecord, send: Send) -> bool:
        settings = self._gateway.settings
        stream = EventStream(send, head=answer.head, write_timeout_s=settings.write_timeout_s)

        async def sink(event: ChoiceEvent) -> None:
            self._account(event, call, record)
            frames = answer.on_event(event)
            if frames:
                await stream.write(frames)

        async def work() -> None:
            await self._run(call, sink)
            await stream.write(answer.tail())

        try:
            await with_keep_alive(stream, answer.keep_alive, settings.keepalive_s, work)
        except ClientDisconnected:
            raise
        except Exception as error:
            if not stream.is_open:
                raise
            record.error_code = error.code if isinstance(error, KeepwarmError) else "internal_error"
            if not isinstance(error, KeepwarmError):
                log_crash(self._gateway.log, request_id=record.request_id, error=error)
            await stream.write(answer.failure(error))
            await stream.close()
            return False
        # Clients hang up right after the terminal event, which cancels nothing any more.
        with anyio.CancelScope(shield=True):
            await stream.close()
        return True

    async def _run(self, call: ModelCall, sink: Sink) -> None:
        await run_choices(
            self._gateway.source, call.choices, sink, stop_grace_s=self._gateway.settings.stop_grace_s
        )

    def _account(self, event: ChoiceEvent, call: ModelCall, record: CallRecord) -> None:
        now, model = self._gateway.now_s(), call.served.name
        if isinstance(event, ChoiceDelta):
            if record.first_token_s is None and event.tokens:
                record.first_token_s = now
                self._gateway.metrics.on_first_token(model, now - record.started_s)
            return
        usage = event.usage
        decode_s = None if record.first_token_s is None else now - record.first_token_s
        self._gateway.metrics.on_answer(model, usage, event.reason, decode_s)
        record.num_prompt_tokens = (record.num_prompt_tokens or 0) + usage.num_prompt_tokens
        record.num_cached_tokens = (record.num_cached_tokens or 0) + usage.num_cached_tokens
        record.num_output_tokens = (record.num_output_tokens or 0) + usage.num_output_tokens
        record.finish_reasons = (*record.finish_reasons, FinishReason(event.reason))
