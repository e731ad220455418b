"""The guard's mirror is what memory holds, live and in the cluster: prompts, answers, cancelled and preempted
work."""

import random

import pytest

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, SessionKey
from keepwarm.core.turns import TurnEnd
from keepwarm.sim.cluster.pool import WorkerPool
from keepwarm.store.eviction.guard import Guard
from keepwarm.store.eviction.keepwarm import KeepwarmFamily
from keepwarm.store.manager import BlockManager, StoreSettings

ROOT = Namespace(model="m", block_size=1).root()


def session(number: int) -> SessionKey:
    return DEFAULT_TENANT, SessionId(f"s{number}")


def real_of(guard: Guard) -> set[object]:
    found: set[object] = set()
    stack = [guard._root]
    while stack:
        node = stack.pop()
        found.update(node.run[: node.num_real])
        stack.extend(node.children.values())
    return found


@pytest.mark.parametrize("num_host_blocks", [0, 8])
@pytest.mark.parametrize("seed", range(8))
def test_the_mirror_is_what_the_block_manager_holds(seed: int, num_host_blocks: int) -> None:
    draw = random.Random(seed)
    family = KeepwarmFamily()
    store = BlockManager(
        StoreSettings(num_device_blocks=24, num_host_blocks=num_host_blocks), family=family, slow_tiers={}
    )
    contexts: dict[int, list[int]] = {}
    known: set[BlockKey] = set()
    for number in range(300):
        now_s = float(number)
        owner = draw.randrange(6)
        context = contexts.setdefault(owner, [owner] * 3)
        if draw.random() < 0.15 and len(context) > 1:
            del context[draw.randrange(1, len(context)) :]
        tokens = [*context, *(draw.randrange(50) for _ in range(draw.randrange(1, 4)))][:14]
        keys = extend_chain(ROOT, ROOT, tuple(tokens), 1)
        known.update(keys)
        family.on_turn_started(session(owner), now_s)
        num_hits = min(store.match(keys, now_s).num_hits, len(keys) - 1)
        lease = store.acquire(
            RequestId(f"r{number}"),
            keys,
            num_hits=num_hits,
            num_blocks=len(keys) + 2,
            now_s=now_s,
            session=session(owner),
        )
        assert lease is not None
        for move in store.take_moves():
            store.complete(move)
        if draw.random() < 0.7:
            answer = [draw.randrange(50) for _ in range(draw.randrange(3))]
            keys = extend_chain(ROOT, ROOT, (*tokens, *answer), 1)
            contexts[owner] = [*tokens, *answer]
        else:  # cancelled in the middle of its prefill
            keys = keys[: draw.randrange(num_hits, len(keys) + 1)]
        store.commit(lease, keys[num_hits:], now_s)
        known.update(keys)
        family.on_turn_ended(TurnEnd(session=session(owner)), now_s)
        lease.release(now_s)
        in_memory = {key for key in known if _is_in_memory(store, key)}
        assert real_of(family.guard) == in_memory
        store.check_invariants()


def _is_in_memory(store: BlockManager, key: BlockKey) -> bool:
    node = store._placement.tree.get(key)
    return node is not None and any(tier in node.copies for tier in (Tier.DEVICE, Tier.HOST))


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_the_mirror_is_what_a_simulated_worker_holds(num_host_blocks: int) -> None:
    draw = random.Random(5)
    family = KeepwarmFamily()
    pool = WorkerPool(24, num_host_blocks, family)
    ends: dict[int, tuple[int, int]] = {}
    next_block = 0
    for number in range(400):
        now_s, owner = float(number), draw.randrange(5)
        start, stop = ends.get(owner, (next_block, next_block))
        if stop - start > 14 or not stop - start:
            start = stop = next_block = next_block + 40  # anew
        stop += draw.randrange(1, 4)
        next_block = max(next_block, stop)
        runs = (range(start, stop),)
        family.on_turn_started(session(owner), now_s)
        found = pool.find(runs)
        leaf = pool.hold(runs, session(owner), now_s, found.num_host)
        pool.trim(now_s)
        family.on_turn_ended(TurnEnd(session=session(owner)), now_s)
        if draw.random() < 0.25:
            num_ready = draw.randrange(found.num_device, stop - start + 1)
            pool.release(leaf, (), session(owner), now_s)
            family.on_released((range(start, start + num_ready),), session(owner), now_s)
            pool.cut(runs, num_ready, now_s)
            stop = start + num_ready
        else:
            more = range(stop, stop + draw.randrange(3))
            pool.release(leaf, (more,) if more else (), session(owner), now_s)
            family.on_released((range(start, more.stop),), session(owner), now_s)
            stop = more.stop
        pool.trim(now_s)
        ends[owner] = (start, stop)
        assert real_of(family.guard) == {block for node in pool._nodes.values() for block in node.run}


def test_a_pause_is_on_nobodys_account() -> None:
    """Admission makes a session's blocks leave first: the shadow lets them go first as well."""
    family = KeepwarmFamily()
    policy = family.new_policy(Tier.DEVICE, 10)
    assert policy is not None
    guard = family.guard
    for number, owner in enumerate((1, 2)):
        guard.on_prompt((range(100 * owner, 100 * owner + 5),), session(owner), float(number))
    family.set_paused(session(2), True, 2.0)
    guard.on_left_memory(range(202, 205))  # the yielding order took the paused session's end
    assert guard.owed == 3.0
    guard.on_prompt((range(300, 303),), session(3), 3.0)
    assert (guard.excess, guard.owed) == (0.0, 0.0)
    family.set_paused(session(2), False, 4.0)
    guard.on_prompt((range(200, 205),), session(2), 4.0)
    assert guard.excess == 0.0
