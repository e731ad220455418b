"""Owns SAGA's agent execution graph, learned from which tool follows which.

Never looks at blocks or time. Held by `store.eviction.saga_sessions`.
"""

from dataclasses import dataclass, field

LEAST_SESSIONS = 30
"""Sessions that must have been seen before anything is inferred."""
LEAST_CONFIDENCE = 0.7
"""A successor that is less probable counts as noise: the agent is taken to stay with its tool."""
TERMINATION = 0.05
"""Probability that a step is the last, where the graph knows no better."""
DEFAULT_OBSERVATION_TOKENS = 300.0
_MAX_TOOLS = 512


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of an agent: which tool, how probable, how many tokens its result has on average."""

    tool: str
    probability: float
    num_observation_tokens: float


@dataclass(slots=True)
class _Observation:
    num_tokens: int = 0
    num_seen: int = 0


@dataclass(slots=True)
class ToolGraph:
    """Counts of tool after tool for one type of agent, and the tokens that tools' results add to a prompt.

    SAGA (arXiv:2605.00528), section on pattern inference and its published code: from 30 sessions on, the
    successor of a tool is the one seen most often after it; when its share is below 0.7 the agent stays with
    its tool. Adapted: counts grow with every turn rather than when a session is complete, and a session
    counts once it has shown two tools, for sessions of a server rarely say that they are complete; where the
    agent stays with its tool, the probability is 0.95, one minus the published chance of termination (the
    code divides by steps that are left, which nobody knows here). Among successors seen equally often the
    smaller name wins.

    All methods but `modal_walk` take O(1). At most 512 tools are known; new ones
    are then ignored.
    """

    num_sessions: int = 0
    version: int = 0
    """Rises whenever an answer of `next_step` may have changed."""
    _counts: dict[str, dict[str, int]] = field(default_factory=dict)
    _totals: dict[str, int] = field(default_factory=dict)
    _modal: dict[str, str] = field(default_factory=dict)
    _observations: dict[str, _Observation] = field(default_factory=dict)
    _steps: dict[str, Step] = field(default_factory=dict)
    """Answers of `next_step` that are still right."""

    def observe(self, tool: str, successor: str, *, is_first: bool) -> None:
        """`successor` was called in the turn after `tool`; `is_first`: the first such pair of its session."""
        self.num_sessions += is_first
        self.version += 1
        self._steps.clear()
        counts = self._counts.get(tool)
        if counts is None:
            if len(self._counts) >= _MAX_TOOLS:
                return
            counts = self._counts[tool] = {}
        if successor not in counts and len(counts) >= _MAX_TOOLS:
            return
        counts[successor] = count = counts.get(successor, 0) + 1
        self._totals[tool] = self._totals.get(tool, 0) + 1
        modal = self._modal.get(tool, successor)
        if (-count, successor) <= (-counts[modal], modal):
            self._modal[tool] = successor

    def observe_tokens(self, tool: str, num_tokens: int) -> None:
        """The result of `tool` added so many tokens to the prompt."""
        if tool not in self._observations and len(self._observations) >= _MAX_TOOLS:
            return
        seen = self._observations.setdefault(tool, _Observation())
        seen.num_tokens += num_tokens
        seen.num_seen += 1
        self.version += 1
        self._steps.clear()

    def observation_tokens(self, tool: str) -> float:
        seen = self._observations.get(tool)
        return seen.num_tokens / seen.num_seen if seen else DEFAULT_OBSERVATION_TOKENS

    def next_step(self, tool: str) -> Step | None:
        """What an agent that called `tool` does next; None while too few sessions were seen."""
        if self.num_sessions < LEAST_SESSIONS:
            return None
        if (step := self._steps.get(tool)) is None:
            step = self._steps[tool] = self._infer(tool)
        return step

    def _infer(self, tool: str) -> Step:
        successor, probability = tool, 1 - TERMINATION
        if total := self._totals.get(tool):
            modal = self._modal[tool]
            share = self._counts[tool][modal] / total
            if share >= LEAST_CONFIDENCE:
                successor, probability = modal, share
        return Step(successor, probability, max(self.observation_tokens(successor), 1.0))

    def modal_walk(self, num_steps: int) -> list[Step]:
        """The path of `num_steps` tools that SAGA infers for a new session, from the tool seen most often on."""
        if not self._totals or self.num_sessions < LEAST_SESSIONS:
            return []
        start = min(self._totals, key=lambda tool: (-self._totals[tool], tool))
        walk = [Step(start, 1.0, max(self.observation_tokens(start), 1.0))]
        while len(walk) < num_steps and (step := self.next_step(walk[-1].tool)):
            walk.append(step)
        return walk


def reuse(step: Step | None, num_cached_tokens: int) -> float:
    """SAGA's probability that a context is used again: 0 without a graph, or with nothing cached.

    The sum over successors has one term, as the inferred graph is a path.
    """
    if step is None or num_cached_tokens <= 0:
        return 0.0
    return step.probability * num_cached_tokens / (num_cached_tokens + step.num_observation_tokens)
