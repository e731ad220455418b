"""Owns DecodeBatch: the decoding requests of one worker, in sums, so that a step costs the same for 1 or 100.

Never decides who decodes. Called by `sim.cluster.worker`.

Steps are numbered from 1 on. A request with `shift` c has a context of c + s tokens in step s: it reads them, and
one more token is sampled.
"""

import heapq

from keepwarm.sim.cluster.request import SimRequest


class DecodeBatch:
    """`report_tokens`: a request is notable each time it has generated so many more tokens."""

    def __init__(self, block_size: int, report_tokens: int) -> None:
        self.num = 0
        self.step = 0
        """Number of the last step that ran."""
        self._block_size = block_size
        self._report_tokens = report_tokens
        self._sum_shifts = 0
        # By step modulo block size: how many requests need one more block in such a step.
        self._growing = [0] * block_size
        # Entries of requests that stopped decoding are skipped: their epoch tells.
        self._notable: list[tuple[int, int, int, SimRequest]] = []

    def add(self, request: SimRequest, num_context_tokens: int) -> None:
        """From the next step on. `num_context_tokens`: in that step, with the token that was just sampled."""
        request.shift = num_context_tokens - self.step - 1
        request.last_step = self.step + request.num_left
        request.epoch += 1
        self.num += 1
        self._sum_shifts += request.shift
        self._growing[(1 - request.shift) % self._block_size] += 1
        self._note(request, self.step + self._report_tokens)

    def remove(self, request: SimRequest) -> None:
        request.epoch += 1
        self.num -= 1
        self._sum_shifts -= request.shift
        self._growing[(1 - request.shift) % self._block_size] -= 1

    def _note(self, request: SimRequest, report_step: int) -> None:
        step = min(request.last_step, report_step)
        heapq.heappush(self._notable, (step, request.order, request.epoch, request))

    def num_kv_tokens(self, step: int) -> int:
        """KV tokens read in `step`."""
        return self._sum_shifts + self.num * step

    def num_new_blocks(self, first_step: int, last_step: int) -> int:
        """Blocks that the steps `first_step` to `last_step` need beyond those held before."""
        size = self._block_size
        num_cycles, num_rest = divmod(last_step - first_step + 1, size)
        start = first_step % size
        growing = self._growing
        num_more = sum(growing[start : start + num_rest])
        if start + num_rest > size:
            num_more += sum(growing[: start + num_rest - size])
        return self.num * num_cycles + num_more

    def next_notable_step(self) -> int:
        """The first step after which a request ends or is to be reported. There must be a request."""
        while self._notable[0][2] != self._notable[0][3].epoch:
            heapq.heappop(self._notable)
        return self._notable[0][0]

    def take_notable(self) -> list[SimRequest]:
        """Requests that have ended or are to be reported after the last step, in order of arrival."""
        found: list[SimRequest] = []
        while self._notable and self._notable[0][0] <= self.step:
            _, _, epoch, request = heapq.heappop(self._notable)
            if request.epoch == epoch:
                found.append(request)
                if request.last_step > self.step:
                    self._note(request, self.step + self._report_tokens)
        return found

    def num_context_tokens(self, request: SimRequest) -> int:
        """In KV after the last step."""
        return request.shift + self.step
