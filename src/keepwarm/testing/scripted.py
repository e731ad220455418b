"""Owns ScriptedExecutor: an engine without a model. Tokens and step times come from the caller.

Never computes. Used by tests of everything above the engine, by `keepwarm serve --model scripted`, and by
plug-in authors.
"""

from collections.abc import Callable

from keepwarm.core.events import SampledToken, TokenLogprob
from keepwarm.core.ids import RequestId
from keepwarm.engine.executor import ModelInfo
from keepwarm.scheduling.plan import Chunk, ChunkFailure, StepPlan, StepResult

NextToken = Callable[[Chunk], int]
"""Token after the last position of a chunk."""
StepTime = Callable[[StepPlan], float]
"""Seconds that a step takes."""


def next_by_position(chunk: Chunk) -> int:
    """A deterministic stand-in for a model: depends on the last token and its position only."""
    return (31 * chunk.token_ids[-1] + 7 * (chunk.start + len(chunk.token_ids))) % 251 + 1


def linear_step_time(base_s: float, per_token_s: float) -> StepTime:
    """Seconds of a step as `base_s + per_token_s * tokens`."""
    return lambda plan: base_s + per_token_s * plan.num_tokens


class ScriptedExecutor:
    """Runs plans by asking two functions. `poison` makes single requests fail, or whole steps raise."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        next_token: NextToken = next_by_position,
        step_time: StepTime | None = None,
        failing: Callable[[RequestId], bool] = lambda request_id: False,
        raising: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self._info = info
        self._next_token = next_token
        self._step_time = step_time or linear_step_time(0.01, 0.0001)
        self._failing = failing
        self._raising = raising
        self.plans: list[StepPlan] = []
        """Every plan that ran, in order."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self._raising(plan):
            raise RuntimeError("scripted failure of a whole step")
        sampled: dict[RequestId, SampledToken] = {}
        failures: list[ChunkFailure] = []
        for chunk in plan.chunks:
            if self._failing(chunk.request_id):
                failures.append(ChunkFailure(request_id=chunk.request_id, message="scripted failure"))
            elif chunk.is_sampled:
                sampled[chunk.request_id] = self._sample(chunk)
        return StepResult(
            step_id=plan.step_id,
            sampled=sampled,
            duration_s=self._step_time(plan),
            failures=tuple(failures),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, chunk: Chunk) -> SampledToken:
        token_id = self._next_token(chunk)
        num_logprobs = chunk.sampling.num_logprobs
        if num_logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, 0.0, (TokenLogprob(token_id, 0.0),) * min(num_logprobs, 1))
