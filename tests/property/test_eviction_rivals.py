"""Each fast policy against the slow, obvious form of its rule, on random histories."""

from typing import Any

import pytest
from eviction_driver import Event, World, events, histories, smallest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import SessionKey
from keepwarm.store.eviction.continuum import ContinuumTtl
from keepwarm.store.eviction.continuum_sessions import ContinuumSessions
from keepwarm.store.eviction.costs import PrefillCost
from keepwarm.store.eviction.families import FAMILY_NAMES, family_of
from keepwarm.store.eviction.frequency import LeafLfu, LeafSlru
from keepwarm.store.eviction.gdsf import Gdsf
from keepwarm.store.eviction.kvflow import KvFlowSteps
from keepwarm.store.eviction.kvflow_sessions import StepOrder
from keepwarm.store.eviction.marconi import Marconi
from keepwarm.store.eviction.ordered import LeafFifo, LeafLru
from keepwarm.store.eviction.policy import BlockFacts
from keepwarm.store.eviction.saga import WaLru
from keepwarm.store.eviction.saga_sessions import SagaSessions
from keepwarm.store.eviction.tool_graph import reuse

COST = PrefillCost(block_size=16)


# ---------------------------------------------------------------------- counting policies


@histories
@given(events)
def test_lru_and_lfu(history: list[Event]) -> None:
    World(LeafLru(), smallest(lambda world, key, facts: 0)).run(history)
    World(LeafLfu(), smallest(lambda world, key, facts: facts.num_uses)).run(history)


@histories
@given(events)
def test_fifo(history: list[Event]) -> None:
    arrivals: dict[int, int] = {}

    def arrive(world: World, key: int, facts: BlockFacts) -> None:
        arrivals.setdefault(key, max(arrivals.values(), default=0) + 1)

    def leave(world: World, key: int) -> None:
        # Keep the highest number in use, so that who comes next is last.
        arrivals[-1] = max(arrivals.values())
        del arrivals[key]

    rank = smallest(lambda world, key, facts: arrivals[key])
    World(LeafFifo(), rank, on_add=arrive, on_victim=leave).run(history)


@histories
@given(events, st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]))
def test_slru(history: list[Event], share: float) -> None:
    """Two lists, kept in order of recency, as in a textbook."""
    probation: list[tuple[float, float, int, int]] = []
    protected: list[tuple[float, float, int, int]] = []

    def find(key: int) -> list[tuple[float, float, int, int]] | None:
        return next((part for part in (probation, protected) if any(row[3] == key for row in part)), None)

    def remove(key: int) -> None:
        for part in (probation, protected):
            part[:] = [row for row in part if row[3] != key]

    def on_add(world: World, key: int, facts: BlockFacts) -> None:
        part = find(key) if key in world.held else None
        before = world.held.get(key)
        recency_s = facts.last_used_s
        if (
            part is None
            or before is None
            or (before.num_uses, before.last_used_s) != (facts.num_uses, facts.last_used_s)
        ):
            part = protected if facts.num_uses > 1 else probation
        else:
            recency_s = next(row[0] for row in part if row[3] == key)
        remove(key)
        part.append((recency_s, facts.last_used_s, -facts.depth, key))

    def victim(world: World) -> int:
        for key in [row[3] for row in (*probation, *protected)]:
            if key not in world.held:
                remove(key)  # leased
        while len(protected) > share * len(world.held):
            row = min(protected)
            protected.remove(row)
            probation.append((max(world.now_s, row[0]), *row[1:]))
        return min(probation or protected)[3]

    policy: LeafSlru[int] = LeafSlru(protected_share=share)
    World(policy, victim, on_add=on_add, on_victim=lambda _, key: remove(key)).run(history)


@histories
@given(events)
def test_gdsf(history: list[Event]) -> None:
    """Each priority is worked out once, when the key is added, from all evictions up to its last use."""
    rises: list[tuple[float, float]] = []
    priorities: dict[int, float] = {}

    def on_add(world: World, key: int, facts: BlockFacts) -> None:
        clock = max((value for at_s, value in rises if at_s <= facts.last_used_s), default=0.0)
        priorities[key] = clock + facts.num_uses * COST.block_s(facts.depth)

    def on_victim(world: World, key: int) -> None:
        rises.append((world.now_s, priorities[key]))

    victim = smallest(lambda world, key, facts: priorities[key])
    World(Gdsf(COST.block_s), victim, on_add=on_add, on_victim=on_victim).run(history)


@histories
@given(events, st.sampled_from([0.0, 0.5, 2.0]))
def test_marconi(history: list[Event], alpha: float) -> None:
    def saving(facts: BlockFacts) -> float:
        return COST.context_s(facts.depth + 1) / (facts.depth + 1)

    def scaled(value: float, values: list[float]) -> float:
        return (value - min(values)) / (max(values) - min(values)) if max(values) > min(values) else 0.0

    def score(world: World, key: int, facts: BlockFacts) -> float:
        rows = list(world.held.values())
        recency = scaled(facts.last_used_s, [row.last_used_s for row in rows])
        # In one product, as the policy does: ties must round alike.
        low, high = min(map(saving, rows)), max(map(saving, rows))
        return recency + (alpha * (saving(facts) - low) / (high - low) if high > low else 0.0)

    World(Marconi(COST, alpha=alpha), smallest(score)).run(history)


# ---------------------------------------------------------------------- policies about sessions


@histories
@given(events, st.booleans(), st.booleans())
def test_wa_lru(history: list[Event], uses_ttl: bool, is_warm: bool) -> None:
    """Rescores everything at every decision."""
    sessions = SagaSessions()
    if is_warm:
        for graph in sessions.graphs.values():
            for _ in range(30):
                graph.observe("Read", "Bash", is_first=True)

    def rank(world: World, key: int, facts: BlockFacts) -> tuple[float, float]:
        sessions.advance(world.now_s if uses_ttl else -1.0)
        expired_s = sessions.expired_s(facts.session)
        if expired_s is not None:
            return (-1.0, expired_s)
        rows = world.held.values()
        idle_max_s = max(0.001, max(world.now_s - row.last_used_s for row in rows))
        size_max = max(row.depth + 1 for row in rows)
        reused = reuse(sessions.next_step(facts.session), (facts.depth + 1) * 16)
        recency = (world.now_s - facts.last_used_s) / idle_max_s
        return (0.0, -(0.3 * recency + 0.5 * (1 - reused) + 0.2 * (facts.depth + 1) / size_max))

    World(WaLru(sessions, block_size=16, uses_ttl=uses_ttl), smallest(rank), listener=sessions).run(history)


@histories
@given(events)
def test_continuum(history: list[Event]) -> None:
    sessions = ContinuumSessions(COST.prefill_s, block_size=16)
    sessions.on_queue_delay(40.0)

    def rank(world: World, key: int, facts: BlockFacts) -> tuple[Any, ...]:
        until_s = None if facts.session is None else sessions._pins.at_s(facts.session)
        if until_s is None or until_s <= world.now_s:
            return (0,)
        assert facts.session is not None
        return (1, -sessions._programs[facts.session].arrived_s, facts.session)

    World(ContinuumTtl(sessions), smallest(rank), listener=sessions).run(history)


@histories
@given(events, st.integers(0, 3))
def test_kvflow(history: list[Event], num_exact: int) -> None:
    """Sorts all sessions that are away by their expected return at every decision."""
    order = StepOrder(num_exact=num_exact)

    def steps(world: World) -> dict[SessionKey, int]:
        returns = []
        for here, agent in order._agents.items():
            if agent.ended_s is not None and agent.gap_s is not None:
                gap_s = agent.gap_s
                while agent.ended_s + gap_s <= world.now_s:
                    gap_s *= 2
                returns.append((agent.ended_s + gap_s, here))
        ranked = {here: min(step, num_exact + 1) for step, (_, here) in enumerate(sorted(returns), start=1)}
        return ranked | {here: 0 for here, agent in order._agents.items() if agent.ended_s is None}

    def rank(world: World, key: int, facts: BlockFacts) -> int:
        assert facts.session is not None
        return -steps(world).get(facts.session, num_exact + 2)

    World(KvFlowSteps(order), smallest(rank), listener=order).run(history)


@settings(max_examples=25, deadline=None)
@given(events)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_family_loses_count(name: str, history: list[Event]) -> None:
    """Any order will do here, but it must be an order of what is there, at all times."""
    family = family_of(name)

    def anything(world: World) -> int:
        victim = world.policy.peek(world.now_s)
        assert victim in world.held
        assert victim is not None
        return victim

    World(family.new_policy(Tier.DEVICE, 10), anything, listener=family).run(history)
