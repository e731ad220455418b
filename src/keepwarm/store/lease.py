"""Owns Lease: the only way to hold blocks.

Never outlives its request: a lease is a context manager, and one that is still open when its worker is
idle is reported as a leak. Created by `store.manager`, held by scheduling.
"""

from collections.abc import Callable
from types import TracebackType

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.ids import RequestId, SessionKey
from keepwarm.store.prefix import Node


class Lease:
    """Device blocks of one request: first findable ones, shared with others, then private ones.

    Fields are written by `store.manager` only; holders read `block_ids` and call `release`.
    """

    def __init__(
        self,
        request_id: RequestId,
        on_release: Callable[["Lease", float], None],
        session: SessionKey | None = None,
    ) -> None:
        self.request_id = request_id
        self.session = session
        self.nodes: list[Node] = []
        """Findable blocks held, in order; they cannot be evicted while the lease is open."""
        self.block_ids: list[int] = []
        """Device slots in order of position; the first `len(nodes)` belong to `nodes`."""
        self.pending_keys: list[BlockKey] = []
        """Keys that this request has promised to compute, in order."""
        self.num_blocks_by_tier: dict[Tier, int] = {}
        """Blocks found warm when the lease was made, by the tier they were found on."""
        self.is_open = True
        self._on_release = on_release

    def release(self, now_s: float) -> None:
        """Give everything back; findable blocks stay cached. A second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._on_release(self, now_s)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Without an instant the blocks keep their last use: leaving early is not a use.
        self.release(max((node.last_used_s for node in self.nodes), default=0.0))
