"""Owns ClosedLoop: when each session's next call leaves, and what its task would have taken at best.

Never looks at a call's way through the cluster. Called by `sim.cluster.loop`, which keeps the clock.

The next call leaves the recorded gap after the simulated end of the last one. A sub-agent starts when its parent's
call before it ends; the parent's next call waits for it when the record says so.
"""

from collections.abc import Callable

from keepwarm.sim.cluster.fairness import TenantLedger
from keepwarm.sim.cluster.result import Ledger
from keepwarm.sim.cluster.sessions import LiveSession, SessionFeed


class ClosedLoop:
    def __init__(
        self,
        *,
        feed: SessionFeed,
        ledger: Ledger,
        tenants: TenantLedger,
        leaves: Callable[[float, LiveSession], None],
    ) -> None:
        """`leaves` is told when the next call of a session leaves, each once."""
        self._feed = feed
        self._ledger = ledger
        self._tenants = tenants
        self._leaves = leaves
        # Sessions are read one ahead; those that are read earlier, to find sub-agents, are not among them.
        self._last_read: LiveSession | None = None

    def read_one(self, now_s: float) -> None:
        """Let the next session that starts by the clock begin. At the start, then by `has_begun`."""
        for live in self._feed.read_one():
            self._last_read = live
            self._begin(live, now_s)

    def has_begun(self, live: LiveSession, now_s: float) -> None:
        """A call of `live` has left."""
        if live is self._last_read:
            self.read_one(now_s)

    def _begin(self, live: LiveSession, now_s: float) -> None:
        live.ideal_s = live.task.start_s = max(live.record.start_s, now_s)
        self._leaves(live.task.start_s, live)

    def go_on(self, live: LiveSession, now_s: float) -> None:
        """A call of `live` has ended: start its sub-agents, and its next call when they are done."""
        calls = live.record.calls
        ended = calls[live.index]
        live.index += 1
        upcoming = calls[live.index] if live.index < len(calls) else None
        recorded_end_s = ended.at_s + ended.service_s
        for found in self._feed.read_until(recorded_end_s if upcoming is None else upcoming.at_s):
            self._begin(found, now_s)
        last_child_s = 0.0
        for child in live.take_children(float("inf") if upcoming is None else upcoming.at_s):
            # Without the recorded end of the call it is not known how long after it the sub-agent started.
            delay_s = max(child.record.start_s - recorded_end_s, 0.0) if ended.service_s else 0.0
            child.ideal_s = live.ideal_s + delay_s
            self._leaves(now_s + delay_s, child)
            if child.record.blocks_parent and upcoming is not None:
                live.num_blockers += 1
                last = child.record.calls[-1]
                last_child_s = max(last_child_s, last.at_s + last.service_s)
        if upcoming is None:
            self._end(live, now_s)
        elif live.num_blockers:
            live.rest_s = max(upcoming.at_s - last_child_s, 0.0)
            live.ideal_blocked_s = live.ideal_s
        else:
            live.ideal_s += upcoming.gap_s
            self._leaves(now_s + upcoming.gap_s, live)

    def _end(self, live: LiveSession, now_s: float) -> None:
        self._feed.close(live)
        parent, task = live.parent, live.task
        task.num_open -= 1
        task.ideal_end_s = max(task.ideal_end_s, live.ideal_s)
        if not task.num_open and task.is_whole:
            ideal_s, realised_s = task.ideal_end_s - task.start_s, now_s - task.start_s
            self._ledger.task_s.append(realised_s)
            self._ledger.sum_ideal_s += ideal_s
            self._tenants.on_task(task.tenant, ideal_s, realised_s)
        if parent is not None and parent.num_blockers and live.record.blocks_parent:
            parent.num_blockers -= 1
            parent.ideal_blocked_s = max(parent.ideal_blocked_s, live.ideal_s)
            if not parent.num_blockers:
                parent.ideal_s = parent.ideal_blocked_s + parent.rest_s
                self._leaves(now_s + parent.rest_s, parent)
