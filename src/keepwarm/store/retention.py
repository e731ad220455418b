"""Owns retention wishes: who asked for which blocks to stay warm, until when, within which budget.

Never keeps a block anywhere: a wish lends a block youth, so that it leaves later than others of its age, and
the loan loses its weight as the others age too. With every block wished for, the oldest still leave first.
Called by `store.manager`.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import BlockKey
from keepwarm.core.ids import TenantId
from keepwarm.core.request import RetentionOutcome, RetentionReport, RetentionWish
from keepwarm.store.prefix import Node


@dataclass(slots=True)
class _Loan:
    node: Node
    tenant_id: TenantId
    ttl_s: float
    expires_s: float
    scheduled_s: float | None = None
    """When `expire` looks at it: each loan has one entry in the heap."""


class RetentionLedger:
    """Wishes of all tenants of one worker. A tenant may have at most `budget_bytes` of blocks under wishes."""

    def __init__(
        self, *, budget_bytes: int, block_bytes: int, block_size: int, on_change: Callable[[Node], None]
    ) -> None:
        self._budget_blocks = budget_bytes // block_bytes
        self._block_size = block_size
        self._on_change = on_change
        self._loans: dict[BlockKey, _Loan] = {}
        self._num_blocks: Counter[TenantId] = Counter()
        self._expiries: list[tuple[float, int, BlockKey]] = []
        self._counter = itertools.count()
        self.num_wishes: Counter[RetentionOutcome] = Counter()
        """Accepted and clipped count wishes, expired counts blocks whose time was over."""

    def num_blocks(self, tenant_id: TenantId) -> int:
        """Blocks under wishes of `tenant_id`."""
        return self._num_blocks[tenant_id]

    def grant(
        self, tenant_id: TenantId, wish: RetentionWish, nodes: Sequence[Node], now_s: float
    ) -> RetentionReport:
        """Lend youth to `nodes`, the blocks of a prompt from its start, as far as the budget goes.

        A block that several wishes name keeps the longest and counts for the tenant that wished first.
        """
        self.expire(now_s)
        wished = nodes if wish.num_tokens is None else nodes[: wish.num_tokens // self._block_size]
        num_granted = 0
        for node in wished:
            loan = self._loans.get(node.key)
            if loan is None or loan.node is not node:
                if self._num_blocks[tenant_id] >= self._budget_blocks:
                    break
                loan = self._loans[node.key] = _Loan(node, tenant_id, 0.0, 0.0)
                self._num_blocks[tenant_id] += 1
            self._extend(loan, wish.ttl_s, now_s)
            num_granted += 1
        is_clipped = num_granted < len(wished)
        outcome = RetentionOutcome.CLIPPED if is_clipped else RetentionOutcome.ACCEPTED
        self.num_wishes[outcome] += 1
        return RetentionReport(
            outcome=outcome,
            num_tokens=num_granted * self._block_size,
            ttl_s=wish.ttl_s if num_granted else 0.0,
        )

    def expire(self, now_s: float) -> None:
        """End the loans whose time is over, and forget those of blocks that are gone."""
        while self._expiries and self._expiries[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._expiries)
            loan = self._loans.get(key)
            if loan is None or due_s != loan.scheduled_s:
                continue  # it ended; there may be a later loan of the same block
            expires_s = self._expires_s(loan, now_s)
            if expires_s > now_s and loan.node.copies:
                self._schedule(loan, expires_s)
                continue
            self._end(loan)
            if loan.node.copies:
                self.num_wishes[RetentionOutcome.EXPIRED] += 1

    def forget(self, key: BlockKey) -> None:
        """The block was dropped: it no longer counts against a budget."""
        if loan := self._loans.get(key):
            self._end(loan)

    def _expires_s(self, loan: _Loan, now_s: float) -> float:
        """A use renews a loan: it counts from the last one."""
        used_s = now_s if loan.node.num_leases else loan.node.last_used_s
        return max(loan.expires_s, used_s + loan.ttl_s)

    def _extend(self, loan: _Loan, ttl_s: float, now_s: float) -> None:
        if loan.ttl_s and ttl_s <= loan.ttl_s and now_s + ttl_s <= self._expires_s(loan, now_s):
            return
        loan.ttl_s = loan.node.youth_s = ttl_s
        loan.expires_s = now_s + ttl_s
        if loan.scheduled_s is None:  # else `expire` finds out when its time comes
            self._schedule(loan, loan.expires_s)
        self._on_change(loan.node)

    def _schedule(self, loan: _Loan, expires_s: float) -> None:
        loan.expires_s = loan.scheduled_s = expires_s
        heapq.heappush(self._expiries, (expires_s, next(self._counter), loan.node.key))
        if len(self._expiries) > 2 * len(self._loans) + 64:  # blocks that were dropped left theirs behind
            self._expiries = [row for row in self._expiries if self._is_live(row)]
            heapq.heapify(self._expiries)

    def _is_live(self, row: tuple[float, int, BlockKey]) -> bool:
        loan = self._loans.get(row[2])
        return loan is not None and loan.scheduled_s == row[0]

    def _end(self, loan: _Loan) -> None:
        del self._loans[loan.node.key]
        self._num_blocks[loan.tenant_id] -= 1
        loan.node.youth_s = 0.0
        if loan.node.copies:
            self._on_change(loan.node)
