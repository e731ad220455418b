"""Owns one streamed call of the demo: the request body out, instants, tokens and accounts back.

Never retries and never keeps a call. Used by `demo.agents` and `demo.tier_agents`.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from keepwarm.core.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, as the API tells it when log-probabilities are asked for."""

    text: str
    data: bytes
    logprob: float


@dataclass(slots=True)
class StreamedCall:
    """One call. What has arrived can be read while it runs, and after it has failed. Written by `run`."""

    first_token_s: float | None = None
    """On the monotonic clock."""
    text: str = ""
    """Text and arguments of tool calls, in the order in which they came."""
    tokens: list[Token] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The last chunk, which carries the accounts."""

    async def run(
        self,
        client: httpx2.AsyncClient,
        body: Mapping[str, Any],
        session: str,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Send and read to the end. Raises httpx2.TransportError when the server goes away meanwhile."""
        headers = {"x-keepwarm-session": session}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                said = await response.aread()
                raise RequestFailed(f"the server answered {response.status_code}: {said!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                self.last = json.loads(line[6:])
                if "error" in self.last:
                    raise RequestFailed(f"the server ended a stream with an error: {self.last['error']}")
                for choice in self.last["choices"]:
                    if self._add(choice) and self.first_token_s is None:
                        self.first_token_s = time.monotonic()
                        on_first_token()

    def _add(self, choice: Mapping[str, Any]) -> bool:
        """Whether `choice` says anything."""
        delta = choice["delta"]
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            self.text += (call["function"].get("name") or "") + call["function"]["arguments"]
        for token in (choice.get("logprobs") or {}).get("content") or ():
            self.tokens.append(Token(token["token"], bytes(token["bytes"]), token["logprob"]))
        return bool(delta.get("content") or delta.get("tool_calls") or choice["finish_reason"])
