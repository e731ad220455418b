"""Owns WorkerMemory: which blocks the requests of one simulated worker hold, and the link to its host.

Never decides who runs. Called by `sim.cluster.worker`.

Whole blocks of a prompt are in the pool, where others find them; what decoding fills is private until the request
stops. Blocks that are being computed are in the pool, too: the worker lets nobody use them before they are ready.
"""

from collections.abc import Callable

from keepwarm.core.blocks import Tier
from keepwarm.sim.cluster.blocks import SeenBlocks, num_blocks_of, slice_runs
from keepwarm.sim.cluster.pool import WorkerPool
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.settings import WorkerSettings
from keepwarm.sim.costs.step import StepCost, prefill_s
from keepwarm.sim.costs.tiers import TierCosts
from keepwarm.sim.traces.call import Runs
from keepwarm.sim.traces.runs import joined
from keepwarm.store.eviction.policy import EvictionFamily


class WorkerMemory:
    def __init__(
        self,
        *,
        settings: WorkerSettings,
        cost: StepCost,
        tiers: TierCosts,
        family: EvictionFamily,
        seen: SeenBlocks,
        name_blocks: Callable[[int], range],
    ) -> None:
        """`seen` is shared by all workers. `name_blocks` names so many blocks that no recorded prompt has."""
        self.pool = WorkerPool(settings.num_blocks, settings.num_host_blocks, family)
        self.num_reloaded_blocks = 0
        self.num_evictions = 0
        self._settings = settings
        self._cost = cost
        self._tiers = tiers
        self._family = family
        self._seen = seen
        self._name_blocks = name_blocks
        self._num_private = 0
        self._link_free_s = 0.0

    @property
    def num_held_blocks(self) -> int:
        """By running requests."""
        return self.pool.num_pinned + self._num_private

    @property
    def num_used_blocks(self) -> int:
        """By them and by what is only cached."""
        return self.pool.num_used + self._num_private

    @property
    def room(self) -> int:
        """Blocks that are free or can be made free."""
        return self.pool.num_blocks - self.num_held_blocks

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._settings.block_size)

    # ------------------------------------------------------------------ taking

    def take(self, request: SimRequest, now_s: float) -> bool:
        """Give `request` blocks for all its tokens; False, changing nothing, when they do not fit now."""
        pool, size = self.pool, self._settings.block_size
        found = pool.find(request.runs)
        num_blocks = self.num_blocks(request.num_tokens)
        if num_blocks - found.num_pinned > self.room:
            return False
        num_usable = (request.num_tokens - 1) // size  # at least one token is left to compute
        num_hits = min(found.num_device, num_usable)
        num_reloaded = self._num_reloaded(num_hits, min(found.num_host, num_usable - num_hits), now_s)
        request.leaf = pool.hold(request.runs, request.session, now_s, num_reloaded)
        self._num_private += num_blocks - request.num_whole
        self._trim(now_s)
        request.num_computed = (num_hits + num_reloaded) * size
        request.set_ready(found.num_device)
        request.loaded_s = now_s
        if num_reloaded:
            self._load(request, num_reloaded, now_s)
        if request.started_s is None:
            request.num_hit_tokens = (num_hits + num_reloaded) * size
            request.num_host_hit_tokens = num_reloaded * size
            num_seen = min(self._seen.num_seen(request.runs), num_usable)
            request.num_fresh_tokens = request.num_tokens - num_seen * size
            self._seen.add(request.runs)
        return True

    def grow(self, num_blocks: int, now_s: float) -> None:
        """`num_blocks` more for decoding; there must be room."""
        if num_blocks:
            self._num_private += num_blocks
            self._trim(now_s)

    def _trim(self, now_s: float) -> None:
        """Raises RuntimeError when the policy names nothing although something could leave."""
        self.num_evictions += len(self.pool.trim(now_s, self._num_private))
        if self.num_used_blocks > self.pool.num_blocks:
            raise RuntimeError(
                f"eviction policy {self._family.name} named no victim although blocks can leave"
            )

    def _num_reloaded(self, num_hits: int, num_host: int, now_s: float) -> int:
        """All that the host has, unless computing it is faster than waiting for it."""
        if not num_host:
            return 0
        size = self._settings.block_size
        waiting_s = max(self._link_free_s - now_s, 0.0)
        reload_s = waiting_s + self._tiers.reload_s(Tier.HOST, num_host * size)
        first, end = num_hits * size, (num_hits + num_host) * size
        return (
            num_host if reload_s < prefill_s(self._cost, first, end, self._settings.max_batch_tokens) else 0
        )

    def _load(self, request: SimRequest, num_blocks: int, now_s: float) -> None:
        """Bring blocks up, behind what is under way; steps of others go on meanwhile."""
        seconds = self._tiers.reload_s(Tier.HOST, num_blocks * self._settings.block_size)
        self._link_free_s = max(self._link_free_s, now_s) + seconds
        request.loaded_s = self._link_free_s
        request.num_loading_blocks = num_blocks
        self.num_reloaded_blocks += num_blocks

    # ------------------------------------------------------------------ giving back

    def give_back(self, request: SimRequest, num_context: int, now_s: float) -> None:
        """`request` has `num_context` tokens in KV and stops: what decoding filled can be found from now on."""
        num_filled = num_context // self._settings.block_size
        more: Runs = ()
        if num_filled > request.num_whole:
            more = self._names(request, num_filled)
        self._num_private -= self.num_blocks(num_context) - request.num_whole
        self.pool.release(request.leaf, more, request.session, now_s)
        self._family.on_released(joined(request.runs + more), request.session, now_s)
        if more:
            self._seen.add(more)
            request.runs = joined(request.runs + more)
            request.num_whole = num_filled

    def take_back(self, request: SimRequest, now_s: float) -> None:
        """`request` stops before its prompt is computed: only what is ready can be found."""
        num_ready = request.num_ready  # what is still being loaded is as good as lost
        if not request.num_loading_blocks:
            num_ready = max(num_ready, request.num_computed // self._settings.block_size)
        self._num_private -= self.num_blocks(request.num_tokens) - request.num_whole
        self.pool.release(request.leaf, (), request.session, now_s)
        self._family.on_released(slice_runs(request.runs, 0, num_ready), request.session, now_s)
        self.pool.cut(request.runs, num_ready, now_s)
        request.num_loading_blocks = 0

    def _names(self, request: SimRequest, num_filled: int) -> Runs:
        """Names of the blocks that decoding has filled: those of the next prompt, if that goes on from here."""
        names: Runs = ()
        if request.next_runs is not None:
            names = slice_runs(request.next_runs, request.num_whole, num_filled)
        num_unnamed = num_filled - request.num_whole - num_blocks_of(names)
        return (*names, self._name_blocks(num_unnamed)) if num_unnamed else names
