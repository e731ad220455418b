"""WorkerPool, device above host: whatever is done to it, its books are right and nothing is lost from sight."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.ids import SessionId, SessionKey, TenantId
from keepwarm.sim.cluster.pool import WorkerPool
from keepwarm.sim.pool import RunNode
from keepwarm.sim.traces.call import Runs
from keepwarm.store.eviction.families import family_of

SESSION: SessionKey = (TenantId("t"), SessionId("s"))
NUM_BLOCKS = 12

# A tree of prompts: each goes on from some place in an earlier one.
trees = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(1, 6)), min_size=2, max_size=7)


def prompts(tree: list[tuple[int, int, int]]) -> list[Runs]:
    found: list[list[int]] = []
    fresh = iter(range(1000))
    for source, num_shared, num_more in tree:
        shared = found[source % len(found)][:num_shared] if found else []
        found.append([*shared, *(next(fresh) for _ in range(num_more))])
    return [joined(numbers) for numbers in found]


def joined(numbers: list[int]) -> Runs:
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return tuple(runs)


def check(pool: WorkerPool) -> None:
    num_used = num_host = num_pinned = 0
    device_leaves: set[int] = set()
    host_leaves: set[int] = set()
    reachable: set[int] = set()
    stack: list[RunNode] = [pool._root]
    while stack:
        node = stack.pop()
        children = list(node.children.values())
        stack += children
        for first, child in node.children.items():
            assert child.parent is node
            assert child.run.start == first
            assert child.depth == node.depth + len(node.run)
            assert child.is_below or not node.is_below
            assert child.num_pins <= node.num_pins or node is pool._root
        if node is pool._root:
            continue
        reachable.add(node.number)
        if node.is_below:
            assert not node.num_pins
            num_host += len(node.run)
            if not children:
                host_leaves.add(node.number)
        else:
            num_used += len(node.run)
            num_pinned += len(node.run) if node.num_pins else 0
            if not node.num_pins and all(child.is_below for child in children):
                device_leaves.add(node.number)
    assert reachable == set(pool._nodes)
    assert (num_used, num_host, num_pinned) == (pool.num_used, pool.num_host_used, pool.num_pinned)
    assert len(pool._policy) == len(device_leaves)
    victim = pool._policy.peek(1e9)
    assert victim in device_leaves if device_leaves else victim is None
    assert num_host <= pool.num_host_blocks
    if pool._host_policy is not None:
        assert len(pool._host_policy) == len(host_leaves)
    assert 0 <= pool.num_dropped <= pool.num_demoted


@dataclass
class Held:
    runs: Runs
    leaf: RunNode | None
    num_computed: int


def num_alike(a: Runs, b: Runs) -> int:
    """Blocks that both begin with."""
    pairs = zip([x for run in a for x in run], [x for run in b for x in run], strict=False)
    return sum(x == y for x, y in pairs)


@settings(max_examples=400, deadline=None)
@given(trees, st.sampled_from([0, 3, 40]), st.data())
def test_books_are_right(tree: list[tuple[int, int, int]], num_host_blocks: int, data: st.DataObject) -> None:
    pool = WorkerPool(NUM_BLOCKS, num_host_blocks, family_of("leaf-lru"))
    known = prompts(tree)
    held: list[Held] = []
    names = iter(range(-1000, 0))
    for now in range(1, data.draw(st.integers(1, 25)) + 1):
        action = data.draw(st.sampled_from(["hold", "hold", "release", "cut", "extend"]))
        if action == "hold":
            runs = data.draw(st.sampled_from(known))
            found = pool.find(runs)
            num_blocks = sum(map(len, runs))
            if pool.num_pinned + num_blocks - found.num_pinned > pool.num_blocks:
                continue
            num_reloaded = data.draw(st.integers(0, found.num_host))
            leaf = pool.hold(runs, SESSION, float(now), num_reloaded)
            pool.trim(float(now))
            assert pool.num_used <= pool.num_blocks
            assert pool.find(runs).num_pinned == num_blocks
            for other in held:  # what somebody goes on from counts as computed
                other.num_computed = max(other.num_computed, num_alike(other.runs, runs))
            held.append(Held(runs, leaf, found.num_device))
        elif held:
            mine = held.pop(data.draw(st.integers(0, len(held) - 1)))
            more: Runs = ()
            if action == "extend" and pool.num_used < pool.num_blocks:
                first = next(names)
                more = (range(first, first + 1),)
            pool.release(mine.leaf, more, SESSION, float(now))
            if action == "cut":
                pool.cut(mine.runs, mine.num_computed, float(now))
                assert pool.find(mine.runs).num_device <= mine.num_computed
        check(pool)
