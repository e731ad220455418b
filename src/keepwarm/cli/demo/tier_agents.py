"""Owns the agents of `keepwarm demo --tiers`: they go on through restarts by sending a lost call again.

Never starts or ends a server. Driven by `demo.tiers`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from keepwarm.cli.demo.agents import TurnRecord
from keepwarm.cli.demo.call import StreamedCall, Token
from keepwarm.core.errors import RequestFailed

RETRY_PAUSE_S = 0.1
GIVE_UP_S = 120.0
"""Longer than any restart."""
CALL_LIMIT_S = 180.0
"""Far longer than any answer takes: a server that hangs is told as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A call that the server had taken when it was killed. Instants count from the start of the load."""

    started_s: float
    ended_s: float
    tokens: tuple[Token, ...]
    """What had been streamed until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered call."""

    phase: int
    """The server that answered, counted from 0."""
    record: TurnRecord
    asked_s: float
    """When the agent first wanted it; earlier than `record.started_s` when it had to be sent again."""
    text: str
    tokens: tuple[Token, ...]
    lost: tuple[Lost, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """Agent and turn."""
        return self.record.agent, self.record.turn

    def has_same_tokens(self, other: "Answer") -> bool:
        return self.text == other.text and _names(self.tokens) == _names(other.tokens)

    def has_same_bits(self, other: "Answer") -> bool:
        """Whether the log-probabilities are equal too, to the last bit."""
        return self.tokens == other.tokens and self.text == other.text

    def keeps_what_was_streamed(self) -> bool:
        """Whether each lost stream was the beginning of this answer."""
        return all(_names(lost.tokens) == _names(self.tokens[: len(lost.tokens)]) for lost in self.lost)


def _names(tokens: Sequence[Token]) -> list[tuple[str, bytes]]:
    return [(token.text, token.data) for token in tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call to make, and the pause after it."""

    turn: int
    body: dict[str, Any]
    pause_s: float


@dataclass(slots=True, kw_only=True)
class Agents:
    """All agents of one load. `phase` is set by whoever ends the server, just before; the rest here only."""

    origin_s: float
    on_first_token: Callable[[], None] = lambda: None
    phase: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def work(self, base_url: str, sessions: Sequence[str], tasks: Sequence[Sequence[Task]]) -> None:
        """One agent for each of `sessions`, side by side, each through its own tasks."""
        # Not through a proxy of the environment: the server is on this machine.
        async with (
            httpx2.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for agent, (session, mine) in enumerate(zip(sessions, tasks, strict=True)):
                group.create_task(self._one(client, agent, session, mine))

    async def _one(self, client: httpx2.AsyncClient, agent: int, session: str, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self.answers.append(await self.ask(client, agent, session, task))
            await asyncio.sleep(task.pause_s)

    async def ask(self, client: httpx2.AsyncClient, agent: int, session: str, task: Task) -> Answer:
        """Send the call until it is answered."""
        asked_s = self.now_s()
        lost: list[Lost] = []
        while True:
            phase, started_s, call = self.phase, self.now_s(), StreamedCall()
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    await call.run(client, task.body, session, self.on_first_token)
                break
            except TimeoutError:
                raise RequestFailed(
                    f"the server took a call (agent {agent + 1}, turn {task.turn + 1}) and did not end its answer "
                    f"within {CALL_LIMIT_S:.0f} s. This is a bug, or the machine is much too slow for the demo."
                ) from None
            except httpx2.TransportError as error:
                if self.now_s() - asked_s > GIVE_UP_S:
                    raise RequestFailed(f"no server answered within {GIVE_UP_S:.0f} s: {error!r}") from error
                if phase != self.phase:
                    lost.append(Lost(started_s=started_s, ended_s=self.now_s(), tokens=tuple(call.tokens)))
            await asyncio.sleep(RETRY_PAUSE_S)
        ended_s = self.now_s()
        accounts = call.last["keepwarm"]
        record = TurnRecord(
            agent=agent,
            turn=task.turn,
            started_s=started_s,
            first_token_s=ended_s if call.first_token_s is None else call.first_token_s - self.origin_s,
            ended_s=ended_s,
            pause_s=task.pause_s,
            num_prompt_tokens=call.last["usage"]["prompt_tokens"],
            num_prefilled_tokens=accounts["prefilled_tokens"],
            cached_by_tier=accounts["cached_by_tier"],
        )
        return Answer(
            phase=phase,
            record=record,
            asked_s=asked_s,
            text=call.text,
            tokens=tuple(call.tokens),
            lost=tuple(lost),
        )

    def now_s(self) -> float:
        """Seconds since the start of the load."""
        return time.monotonic() - self.origin_s
