"""The two greedy choices against the exact optimum on small instances."""

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.workflow.admission.knapsack import cover, pack

ITEMS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=8)


def subsets(count: int) -> list[tuple[int, ...]]:
    return [chosen for size in range(count + 1) for chosen in combinations(range(count), size)]


def best_pack(values: list[float], sizes: list[int], room: int) -> float:
    return max(
        sum(values[i] for i in chosen)
        for chosen in subsets(len(sizes))
        if sum(sizes[i] for i in chosen) <= room
    )


def best_cover(costs: list[float], sizes: list[int], need: int) -> float:
    return min(
        sum(costs[i] for i in chosen)
        for chosen in subsets(len(sizes))
        if sum(sizes[i] for i in chosen) >= need
    )


@given(items=ITEMS, room=st.integers(0, 150))
def test_what_is_packed_fits_and_is_worth_half_of_the_optimum(
    items: list[tuple[int, int]], room: int
) -> None:
    values, sizes = [float(value) for value, _ in items], [size for _, size in items]
    chosen = pack(values, sizes, room)
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[i] for i in chosen) <= room
    assert 2 * sum(values[i] for i in chosen) >= best_pack(values, sizes, room)


@given(items=ITEMS, need=st.integers(0, 150))
def test_what_is_taken_out_is_enough_and_costs_at_most_twice_the_optimum(
    items: list[tuple[int, int]], need: int
) -> None:
    costs, sizes = [float(cost) for cost, _ in items], [size for _, size in items]
    chosen = cover(costs, sizes, need)
    assert len(set(chosen)) == len(chosen)
    if sum(sizes) < need:
        assert sorted(chosen) == list(range(len(sizes)))
        return
    assert sum(sizes[i] for i in chosen) >= need
    assert sum(costs[i] for i in chosen) <= 2 * best_cover(costs, sizes, need)


def test_nine_and_ten_for_ten() -> None:
    """Shortest first takes both (181) where the ten alone is enough (100)."""
    assert cover([81.0, 100.0], [9, 10], 10) == [1]


def test_one_swap_finds_what_greed_leaves() -> None:
    """By value per size the two small ones go first, and the large one would have been better than the second."""
    assert sorted(pack([10.0, 9.0, 12.0], [5, 5, 7], 12)) == [0, 2]


def test_a_cover_is_the_best_of_all_candidates_and_swaps_once() -> None:
    """The first complete cover of the greedy order costs 7 here; a later candidate costs 3."""
    assert sorted(cover([2.0, 7.0, 1.0, 5.0], [2, 9, 6, 4], 8)) == [0, 2]
    assert sorted(cover([6.0, 1.0, 3.0], [7, 1, 5], 8)) == [0, 1], "the small one in place of the middle one"


def test_equal_items_are_taken_in_order() -> None:
    assert pack([1.0, 1.0, 1.0], [2, 2, 2], 4) == [0, 1]
    assert cover([1.0, 1.0, 1.0], [2, 2, 2], 3) in ([0, 1], [1, 0])


def test_the_usual_loss_is_a_few_percent() -> None:
    """Random instances of ten: what `cover` costs and `pack` loses against the optimum, and shortest-first beside
    them; costs are sizes squared, as in ThunderAgent's claim."""
    chance = random.Random(1)
    covers, packs, shortest = [], [], []
    for _ in range(60):
        sizes = [chance.randint(1, 100) for _ in range(10)]
        squares = [float(size * size) for size in sizes]
        values = [chance.uniform(1, 100) for _ in sizes]
        need = chance.randint(100, sum(sizes))
        least = best_cover(squares, sizes, need)
        covers.append(sum(squares[i] for i in cover(squares, sizes, need)) / least)
        packs.append(sum(values[i] for i in pack(values, sizes, need)) / best_pack(values, sizes, need))
        taken, size = 0.0, 0
        for index in sorted(range(10), key=lambda i: sizes[i]):
            if size < need:
                taken, size = taken + squares[index], size + sizes[index]
        shortest.append(taken / least)
    mean_cover, mean_pack = sum(covers) / 60, sum(packs) / 60
    assert mean_cover < 1.06
    assert mean_pack > 0.95
    assert mean_cover < sum(shortest) / 60
