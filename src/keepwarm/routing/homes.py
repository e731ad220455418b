"""Owns SessionHomes: where each session's last call ran, within bounds of number and time.

Never decides where the next one runs. Called by `routing.router`.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

from keepwarm.core.ids import SessionKey, WorkerId


class _Home(NamedTuple):
    worker_id: WorkerId
    num_tokens: int
    at_s: float


class SessionHomes:
    """Forgets sessions that called nothing for `idle_s` seconds, and the longest idle beyond `max_sessions`."""

    def __init__(self, *, max_sessions: int = 65_536, idle_s: float = 1800.0) -> None:
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        # The longest idle first.
        self._homes: OrderedDict[SessionKey, _Home] = OrderedDict()
        self._num_tokens: Counter[WorkerId] = Counter()

    def __len__(self) -> int:
        return len(self._homes)

    def expire(self, now_s: float) -> None:
        """Forget who has been idle for too long."""
        while self._homes and next(iter(self._homes.values())).at_s < now_s - self._idle_s:
            self._forget_oldest()

    def of(self, session: SessionKey) -> WorkerId | None:
        home = self._homes.get(session)
        return home.worker_id if home else None

    def num_tokens(self, worker_id: WorkerId) -> int:
        """Prompt tokens of the sessions at home there; a prompt shared by two counts twice."""
        return self._num_tokens[worker_id]

    def settle(self, session: SessionKey, worker_id: WorkerId, num_tokens: int, now_s: float) -> None:
        """A call of `session` with a prompt of `num_tokens` tokens went to `worker_id`."""
        self.close(session)
        self._homes[session] = _Home(worker_id, num_tokens, now_s)
        self._num_tokens[worker_id] += num_tokens
        if len(self._homes) > self._max_sessions:
            self._forget_oldest()

    def close(self, session: SessionKey) -> None:
        """Forget `session`, if it is known."""
        if home := self._homes.pop(session, None):
            self._num_tokens[home.worker_id] -= home.num_tokens

    def _forget_oldest(self) -> None:
        _, home = self._homes.popitem(last=False)
        self._num_tokens[home.worker_id] -= home.num_tokens
