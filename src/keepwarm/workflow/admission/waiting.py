"""Owns the calls that wait for working-set admission: those of seated sessions by worker, the others in one
line.

Never decides which goes. Called by `working_set`.
"""

import heapq
from bisect import bisect_left, insort

from keepwarm.core.ids import RequestId, SessionKey, TenantId, WorkerId
from keepwarm.workflow.admission.policy import WaitingCall


class WaitingCalls:
    """`ready` calls have memory and lack a slot at most; `held` calls lack a seat for their session."""

    def __init__(self) -> None:
        self._homes: dict[RequestId, WorkerId | None] = {}
        self._needs: dict[RequestId, int] = {}
        self._needs_of_held: list[int] = []
        self._by_age: list[tuple[float, int, RequestId]] = []
        self._not_late: list[tuple[float, int, RequestId]] = []
        self._num_seen = 0
        self.num_held_tokens = 0
        """Working sets of the held calls."""
        self.ready: dict[WorkerId, dict[RequestId, WaitingCall]] = {}
        self.held: dict[RequestId, WaitingCall] = {}
        self.num_by_tenant: dict[TenantId, int] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._homes

    def add(self, call: WaitingCall, home: WorkerId | None, num_needed_tokens: int) -> None:
        """`home` None: its session has no seat."""
        self._num_seen += 1
        entry = (call.arrival_s, self._num_seen, call.request_id)
        heapq.heappush(self._by_age, entry)
        heapq.heappush(self._not_late, entry)
        tenant = call.session[0]
        self.num_by_tenant[tenant] = self.num_by_tenant.get(tenant, 0) + 1
        self._needs[call.request_id] = num_needed_tokens
        self._put(call, home)

    def get(self, request_id: RequestId) -> WaitingCall:
        """A call that waits."""
        home = self._homes[request_id]
        return (self.held if home is None else self.ready[home])[request_id]

    def need(self, request_id: RequestId) -> int:
        """Working set of a waiting call's session, as it was when the call came."""
        return self._needs[request_id]

    def remove(self, request_id: RequestId) -> WaitingCall | None:
        if request_id not in self._homes:
            return None
        call = self._pull(request_id)
        del self._needs[request_id]
        tenant = call.session[0]
        self.num_by_tenant[tenant] -= 1
        if not self.num_by_tenant[tenant]:
            del self.num_by_tenant[tenant]
        return call

    def move(self, session: SessionKey, home: WorkerId | None) -> None:
        """The session got a seat at `home`, or lost it: its other calls wait there now."""
        lines = [self.held, *self.ready.values()]
        for call in [call for line in lines for call in line.values() if call.session == session]:
            self._pull(call.request_id)
            self._put(call, home)

    def oldest(self) -> tuple[float, RequestId] | None:
        """Arrival and id of the call that has waited longest."""
        while self._by_age and self._by_age[0][2] not in self._homes:
            heapq.heappop(self._by_age)
        return (self._by_age[0][0], self._by_age[0][2]) if self._by_age else None

    def oldest_not_late(self) -> tuple[float, RequestId] | None:
        """The same among held calls that have not been given up as late."""
        while self._not_late and self._not_late[0][2] not in self.held:
            heapq.heappop(self._not_late)
        return (self._not_late[0][0], self._not_late[0][2]) if self._not_late else None

    def give_up(self) -> None:
        """The call named by `oldest_not_late` may be late."""
        heapq.heappop(self._not_late)

    def smallest_held_need(self) -> int | None:
        return self._needs_of_held[0] if self._needs_of_held else None

    def _put(self, call: WaitingCall, home: WorkerId | None) -> None:
        self._homes[call.request_id] = home
        if home is None:
            self.held[call.request_id] = call
            insort(self._needs_of_held, self._needs[call.request_id])
            self.num_held_tokens += self._needs[call.request_id]
        else:
            self.ready.setdefault(home, {})[call.request_id] = call

    def _pull(self, request_id: RequestId) -> WaitingCall:
        home = self._homes.pop(request_id)
        if home is not None:
            line = self.ready[home]
            call = line.pop(request_id)
            if not line:
                del self.ready[home]
            return call
        self.num_held_tokens -= self._needs[request_id]
        del self._needs_of_held[bisect_left(self._needs_of_held, self._needs[request_id])]
        return self.held.pop(request_id)
