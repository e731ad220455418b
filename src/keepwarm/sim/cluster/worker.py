"""Owns SimWorker: one engine in virtual time, with continuous batching, chunked prefill and preemption.

Never chooses between sessions: it takes what it was given in order of arrival, by the same rules as
`scheduling.scheduler`. Never reads a clock. Driven by `sim.cluster.loop`: `submit`, then `plan`; at the end of
the `stretch` `end` and `plan` again. Steps that only decode are one stretch, cut when something happens meanwhile.

A step is filled in this order: a token for each decoding request, chunks of those in prefill, then requests that
wait. A waiting request whose next block another one is computing waits for it.
"""

from bisect import insort
from typing import Protocol

from keepwarm.core.ids import WorkerId
from keepwarm.sim.cluster.blocks import block_at
from keepwarm.sim.cluster.decoding import DecodeBatch
from keepwarm.sim.cluster.memory import WorkerMemory
from keepwarm.sim.cluster.request import SimRequest
from keepwarm.sim.cluster.settings import Stepping, WorkerSettings
from keepwarm.sim.cluster.stretch import Stretch
from keepwarm.sim.costs.step import StepCost, sum_positions


class WorkerListener(Protocol):
    """Told while a worker plans or ends a step."""

    def on_started(self, worker: "SimWorker", request: SimRequest, now_s: float) -> None:
        """It got its blocks for the first time."""
        ...

    def on_first_token(self, worker: "SimWorker", request: SimRequest, now_s: float) -> None: ...

    def on_grown(self, request: SimRequest, num_context_tokens: int, now_s: float) -> None: ...

    def on_finished(self, worker: "SimWorker", request: SimRequest, now_s: float) -> None:
        """Its blocks cannot be evicted yet."""
        ...


class SimWorker:
    def __init__(
        self,
        worker_id: WorkerId,
        *,
        settings: WorkerSettings,
        cost: StepCost,
        memory: WorkerMemory,
        listener: WorkerListener,
    ) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self.memory = memory
        self.batch = DecodeBatch(settings.block_size, settings.report_tokens)
        self.is_busy = False
        self.rank = 0
        """Its place among the workers. Kept by the loop."""
        self.is_planned = False
        """Whether a `plan` is due. Kept by the loop."""
        self.stretch = Stretch(self._decode_s)
        """Under way while `is_busy`."""
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0
        self.busy_s = 0.0
        self.running: list[SimRequest] = []
        """In order of admission."""
        self.waiting: list[SimRequest] = []
        """In order of arrival; the preempted keep their place."""
        self.num_waiting_blocks = 0
        self.has_changed = True
        """Whether who runs or waits has changed since the loop looked. Reset by the loop."""
        self.num_held_blocks = 0
        """By running requests, when that last changed."""
        self.num_used_blocks = 0
        """By them and by what is only cached, then."""
        self.num_kv_tokens = 0
        """Read by decoding requests, then."""
        self._cost = cost
        self._listener = listener
        self._prefilling: list[SimRequest] = []
        self._loads: list[float] = []
        self._chunks: list[tuple[SimRequest, int]] = []
        self._grown_step = 0
        self._blocked: SimRequest | None = None
        self._is_regrouped = False
        """Whether who runs, or what it holds, has changed since stock was taken. Not by arrivals: single steps and
        stretches must take stock at the same instants."""
        self._share = 0.0

    # ------------------------------------------------------------------ from outside

    def submit(self, request: SimRequest) -> None:
        insort(self.waiting, request, key=lambda waiting: waiting.order)
        self.num_waiting_blocks += self.memory.num_blocks(request.num_tokens)
        self.has_changed = True

    def take_loads(self) -> list[float]:
        """Instants at which something asked of the host is there."""
        loads, self._loads = self._loads, []
        return loads

    def can_start_more(self) -> bool:
        """Whether a request that arrives now could start with the next step."""
        return self._blocked is None and len(self.running) < self.settings.max_running

    def catch_up(self, now_s: float) -> None:
        """Let decoding take the blocks of the steps that have begun before `now_s`, as one by one they would."""
        if self.is_busy and self.stretch.num_steps > 1:
            self._grow(self.batch.step + self.stretch.num_started(now_s), now_s)

    @property
    def is_tight(self) -> bool:
        """Whether decoding may evict before the stretch ends."""
        if self.stretch.num_steps <= 1 or not self.is_busy:
            return False
        num_new = self.batch.num_new_blocks(self._grown_step + 1, self.batch.step + self.stretch.num_steps)
        return self.memory.num_used_blocks + num_new > self.settings.num_blocks

    # ------------------------------------------------------------------ planning

    def plan(self, now_s: float) -> bool:
        """Begin the next step, or stretch of steps. False when nothing can run."""
        step = self.batch.step + 1
        if self.batch.num:
            self._make_room(step, now_s)
        self._grown_step = step
        num_tokens, num_positions = self._fill(now_s)
        if self._is_regrouped:
            self._take_stock()
        num_decoding, num_kv = self.batch.num, self.batch.num_kv_tokens(step)
        self.is_busy = bool(num_tokens or num_decoding)
        if num_tokens:
            duration_s = self._cost.step_s(num_tokens, num_positions, num_decoding, num_kv)
            self.stretch.begin(now_s, 1, duration_s)
        elif num_decoding:
            num_steps = self._num_alike(step)
            self.stretch.begin(now_s, num_steps, self._decode_s(num_steps))
        return self.is_busy

    def _fill(self, now_s: float) -> tuple[int, int]:
        """Chunks of prefill for this step: their tokens, and the sum of their positions."""
        self._chunks.clear()
        budget = self.settings.max_batch_tokens - self.batch.num
        num_positions = 0
        for request in self._prefilling:
            if budget and request.loaded_s <= now_s:
                if request.num_loading_blocks:
                    request.set_ready(request.num_ready + request.num_loading_blocks)
                    request.num_loading_blocks = 0
                num_positions += self._add_chunk(request, budget)
                budget -= self._chunks[-1][1]
        index = 0
        while budget and index < len(self.waiting) and len(self.running) < self.settings.max_running:
            request = self.waiting[index]
            if request is self._blocked:
                break
            if self._is_held(request):
                index += 1
                continue
            if not self._start(request, now_s):
                self._blocked = request
                break
            if request.loaded_s <= now_s:
                num_positions += self._add_chunk(request, budget)
                budget -= self._chunks[-1][1]
        return self.settings.max_batch_tokens - self.batch.num - budget, num_positions

    def _add_chunk(self, request: SimRequest, budget: int) -> int:
        num_tokens = min(budget, request.num_tokens - request.num_computed)
        self._chunks.append((request, num_tokens))
        return sum_positions(request.num_computed, num_tokens)

    def _is_held(self, request: SimRequest) -> bool:
        """Whether the next block that `request` needs is being computed, or moved, for another one."""
        num_usable = (request.num_tokens - 1) // self.settings.block_size
        for other in self._prefilling:
            index = other.num_ready
            if (
                index < num_usable
                and other.pending_block is not None
                and block_at(request.runs, index) == other.pending_block
            ):
                return True
        return False

    def _num_alike(self, step: int) -> int:
        """Steps from `step` on that only decode, for the same requests, and for which there is room."""
        if self.settings.stepping is Stepping.SINGLE:
            return 1
        last = self.batch.next_notable_step()
        room = self.memory.room
        if self.batch.num_new_blocks(step + 1, last) <= room:
            return last - step + 1
        low, high = step, last  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.batch.num_new_blocks(step + 1, middle) <= room:
                low = middle
            else:
                high = middle
        return low - step + 1

    def _decode_s(self, num_steps: int) -> float:
        num_kv = self.batch.num_kv_tokens(self.batch.step + 1)
        return self._cost.decode_s(self.batch.num, num_kv, num_steps)

    # ------------------------------------------------------------------ who runs

    def _start(self, request: SimRequest, now_s: float) -> bool:
        """Give `request` its blocks; False, changing nothing, when they do not fit now."""
        if not self.memory.take(request, now_s):
            return False
        self.waiting.remove(request)
        self.num_waiting_blocks -= self.memory.num_blocks(request.num_tokens)
        self.running.append(request)
        self._prefilling.append(request)
        if request.num_loading_blocks:
            self._loads.append(request.loaded_s)
        request.is_running, request.resumed_s, request.share_mark = True, now_s, self._share
        if request.started_s is None:
            request.started_s = now_s
            self._listener.on_started(self, request, now_s)
        self._is_regrouped = True
        return True

    def _make_room(self, step: int, now_s: float) -> None:
        """Blocks for the tokens that decode in `step`, preempting the youngest while there are too few."""
        while (num_new := self.batch.num_new_blocks(step, step)) > self.memory.room:
            self._preempt(max(self.running, key=lambda request: request.order), now_s)
        self.memory.grow(num_new, now_s)

    def _grow(self, step: int, now_s: float) -> None:
        """Blocks for decoding up to `step`; `_num_alike` made sure that they can be had."""
        if step > self._grown_step:
            num_new = self.batch.num_new_blocks(self._grown_step + 1, step)
            self._grown_step = step
            self.memory.grow(num_new, now_s)

    def _preempt(self, request: SimRequest, now_s: float) -> None:
        """Back to the queue; what is computed of its whole blocks stays findable."""
        if request in self._prefilling:
            self._prefilling.remove(request)
            self.memory.take_back(request, now_s)
        else:
            num_context = self.batch.num_context_tokens(request)
            request.num_left = request.last_step - self.batch.step
            self.batch.remove(request)
            self.memory.give_back(request, num_context, now_s)
            request.num_tokens = num_context + 1
        self.running.remove(request)
        self._stop_clock(request, now_s)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._blocked = None
        self._is_regrouped = True
        self.submit(request)

    # ------------------------------------------------------------------ results

    def end(self, now_s: float) -> None:
        """The stretch that was planned has run."""
        num_steps, start_s, batch = self.stretch.num_steps, self.stretch.start_s, self.batch
        self.is_busy = False
        self._grow(batch.step + num_steps, now_s)
        batch.step += num_steps
        self.busy_s += now_s - start_s
        self._share += (now_s - start_s) / len(self.running)
        for request in batch.take_notable() if batch.num else ():
            if request.last_step == batch.step:
                num_context = batch.num_context_tokens(request)
                batch.remove(request)
                self._finish(request, num_context, now_s)
            else:
                self._listener.on_grown(request, batch.num_context_tokens(request), now_s)
            self._is_regrouped = True
        for request, num_tokens in self._chunks:
            self._advance(request, num_tokens, now_s)
        self._chunks.clear()
        if self._is_regrouped:
            self._take_stock()

    def _advance(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
        request.num_computed += num_tokens
        request.num_prefilled += num_tokens
        self.num_prefilled_tokens += num_tokens
        num_ready = min(request.num_computed // self.settings.block_size, request.num_whole)
        if num_ready > request.num_ready:
            request.set_ready(num_ready)
        if request.num_computed < request.num_tokens:
            return
        self._prefilling.remove(request)
        self._is_regrouped = True
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._listener.on_first_token(self, request, now_s)
        request.num_left -= 1
        if request.num_left:
            self.batch.add(request, request.num_tokens + 1)
        else:
            self._finish(request, request.num_tokens, now_s)

    def _finish(self, request: SimRequest, num_context: int, now_s: float) -> None:
        self.running.remove(request)
        self._is_regrouped = True
        request.ended_s = now_s
        self._stop_clock(request, now_s)
        self._blocked = None
        self._listener.on_finished(self, request, now_s)
        self.memory.give_back(request, num_context, now_s)

    def _stop_clock(self, request: SimRequest, now_s: float) -> None:
        request.is_running = False
        request.service_s += now_s - request.resumed_s
        request.device_s += self._share - request.share_mark

    def _take_stock(self) -> None:
        self._is_regrouped, self.has_changed = False, True
        self.num_held_blocks, self.num_used_blocks = self.memory.num_held_blocks, self.memory.num_used_blocks
        self.num_kv_tokens = self.batch.num_kv_tokens(self.batch.step) if self.batch.num else 0
