"""Random histories for eviction policies, and a world that checks every victim against a slow reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop, TurnEnd
from keepwarm.store.eviction.policy import BlockFacts, EvictionPolicy


def session(number: int) -> SessionKey:
    return (TenantId("t"), SessionId(str(number)))


@dataclass(frozen=True)
class Event:
    kind: str
    key: int
    wait_s: float
    depth: int
    num_uses: int
    tool: str | None


events = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(
            ["add", "add", "add", "shorten", "lease", "evict", "evict", "start", "end", "close"]
        ),
        key=st.integers(0, 11),
        wait_s=st.sampled_from([0.0, 0.0, 0.1, 1.0, 7.0, 100.0]),
        depth=st.integers(0, 9),
        num_uses=st.integers(1, 3),
        tool=st.sampled_from([None, "Read", "Bash", "WebFetch"]),
    ),
    max_size=80,
)


@dataclass
class World:
    """Replays events on a policy and its table of sessions, and checks every victim against a slow reference."""

    policy: EvictionPolicy[int]
    expected: "Callable[[World], int]"
    listener: Any = None
    now_s: float = 0.0
    held: dict[int, BlockFacts] = field(default_factory=dict)
    on_add: "Callable[[World, int, BlockFacts], None]" = lambda world, key, facts: None
    on_victim: "Callable[[World, int], None]" = lambda world, key: None

    def run(self, history: list[Event]) -> None:
        for event in history:
            self.now_s += event.wait_s
            self.step(event)
            assert len(self.policy) == len(self.held)
        while self.held:
            self.evict()
        assert self.policy.peek(self.now_s) is None

    def step(self, event: Event) -> None:
        here = session(event.key % 4)
        match event.kind:
            case "add":
                owner = session((event.key + event.depth) % 4)
                self.add(event.key, BlockFacts(self.now_s, event.depth, event.num_uses, owner))
            case "shorten" if (facts := self.held.get(event.key)) and facts.depth:
                self.add(
                    event.key, BlockFacts(facts.last_used_s, facts.depth - 1, facts.num_uses, facts.session)
                )
            case "lease":
                self.policy.discard(event.key)
                self.held.pop(event.key, None)
            case "evict" if self.held:
                self.evict()
            case "start" if self.listener:
                self.listener.on_turn_started(here, self.now_s)
            case "end" if self.listener:
                tools = (event.tool,) if event.tool else ()
                self.listener.on_turn_ended(
                    TurnEnd(
                        session=here,
                        stop=Stop.TOOL if tools else Stop.END,
                        tools=tools,
                        num_prompt_tokens=event.depth * 10_000,
                        num_output_tokens=10,
                        is_final=event.num_uses == 3 and event.depth == 0,
                    ),
                    self.now_s,
                )
            case "close" if self.listener:
                self.listener.on_session_closed(here, self.now_s)
            case _:
                pass

    def add(self, key: int, facts: BlockFacts) -> None:
        self.policy.add(key, facts, self.now_s)
        self.on_add(self, key, facts)
        self.held[key] = facts

    def evict(self) -> None:
        victim = self.policy.peek(self.now_s)
        assert victim is not None
        assert victim == self.expected(self), self
        assert self.policy.peek(self.now_s) == victim
        self.on_victim(self, victim)
        self.policy.discard(victim)
        del self.held[victim]


def smallest(rank: Callable[[World, int, BlockFacts], Any]) -> Callable[[World], int]:
    """The key of the smallest rank, then the least recently used, the deepest, the smaller key."""

    def victim(world: World) -> int:
        return min(
            world.held,
            key=lambda key: (
                rank(world, key, world.held[key]),
                world.held[key].last_used_s,
                -world.held[key].depth,
                key,
            ),
        )

    return victim


histories = settings(max_examples=150, deadline=None)
