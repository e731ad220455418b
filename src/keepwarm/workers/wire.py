"""Owns the messages between a gateway and a worker process: msgspec structs, encoded as MessagePack.

Never interprets them. Used by `workers.remote` (gateway side) and `workers.server` (worker side).
"""

from typing import Any

import msgspec

from keepwarm.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    TokensGenerated,
    WorkerEvent,
)
from keepwarm.core.ids import RequestId, SessionKey, WorkerId
from keepwarm.core.request import Request
from keepwarm.core.stats import WorkerStats
from keepwarm.core.turns import TurnEnd
from keepwarm.engine.executor import ModelInfo
from keepwarm.workers.worker import WorkerHealth

PROTOCOL_VERSION = 2


class ToWorker(msgspec.Struct, tag=True, frozen=True):
    """Base of what a gateway sends."""


class Connect(ToWorker, frozen=True):
    """First message, and the heartbeat afterwards. Answered by Hello."""

    protocol_version: int


class Submit(ToWorker, frozen=True):
    request: Request
    epoch: str
    """The worker's epoch as the sender knows it: a restarted worker drops what was meant for its forerunner."""


class Cancel(ToWorker, frozen=True):
    request_id: RequestId


class Note(ToWorker, frozen=True):
    """How the last call of a session stopped. Not answered."""

    turn: TurnEnd


class Pause(ToWorker, frozen=True):
    """Whether a session's blocks should be the first to leave the device. Not answered."""

    session: SessionKey
    is_paused: bool


class GetStats(ToWorker, frozen=True):
    call_id: int


class Drain(ToWorker, frozen=True):
    call_id: int


class ToGateway(msgspec.Struct, tag=True, frozen=True):
    """Base of what a worker sends."""


class Hello(ToGateway, frozen=True):
    protocol_version: int
    worker_id: WorkerId
    epoch: str
    """New at each start of the worker process."""
    health: WorkerHealth
    info: ModelInfo


class Tokens(ToGateway, frozen=True):
    event: TokensGenerated


class Finished(ToGateway, frozen=True):
    event: RequestFinished


class Stored(ToGateway, frozen=True):
    event: BlocksStored


class Removed(ToGateway, frozen=True):
    event: BlocksRemoved


class Cleared(ToGateway, frozen=True):
    event: AllBlocksCleared


class Refused(ToGateway, frozen=True):
    """The worker takes no new requests now."""

    request_id: RequestId
    message: str


class Stats(ToGateway, frozen=True):
    call_id: int
    stats: WorkerStats


class Drained(ToGateway, frozen=True):
    call_id: int


class DecisionTaken(ToGateway, frozen=True):
    """A line of the worker's decision record."""

    line: str


WorkerMessage = Connect | Submit | Cancel | Note | Pause | GetStats | Drain
GatewayMessage = (
    Hello | Tokens | Finished | Stored | Removed | Cleared | Refused | Stats | Drained | DecisionTaken
)

_encoder = msgspec.msgpack.Encoder()
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage)


def encode(message: ToWorker | ToGateway) -> bytes:
    return _encoder.encode(message)


def decode_for_worker(data: bytes) -> Any:
    """One of `WorkerMessage`. Raises msgspec.ValidationError on anything else."""
    return _worker_decoder.decode(data)


def decode_for_gateway(data: bytes) -> Any:
    """One of `GatewayMessage`. Raises msgspec.ValidationError on anything else."""
    return _gateway_decoder.decode(data)


def event_message(event: WorkerEvent) -> ToGateway:
    match event:
        case TokensGenerated():
            return Tokens(event)
        case RequestFinished():
            return Finished(event)
        case BlocksStored():
            return Stored(event)
        case BlocksRemoved():
            return Removed(event)
        case AllBlocksCleared():
            return Cleared(event)
