"""Owns two small choices: what to pack into a room, and what to take out so that enough room comes free.

Never knows what the items are. Called by `working_set`. Both are greedy with a repair step; `tests/property`
measures them against the exact optimum.
"""

from collections.abc import Sequence


def pack(values: Sequence[float], sizes: Sequence[int], room: int) -> list[int]:
    """Indices of items of large total value with total size at most `room`, by value per size.

    Greedy by value per size, against the best single item; then each chosen item is swapped once for the best
    item left out that fits in its place. At least half of the optimum. Values are above 0, sizes at least 0.
    """
    fitting = [index for index in range(len(sizes)) if sizes[index] <= room]
    if not fitting:
        return []
    order = sorted(fitting, key=lambda index: (-values[index] / max(sizes[index], 1), index))
    chosen: list[int] = []
    left = room
    for index in order:
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
    single = max(fitting, key=lambda index: (values[index], -index))
    if values[single] > sum(values[index] for index in chosen):
        chosen, left = [single], room - sizes[single]
    return _swap(values, sizes, order, chosen, left)


def _swap(
    values: Sequence[float], sizes: Sequence[int], order: list[int], chosen: list[int], left: int
) -> list[int]:
    """One better partner for each chosen item, where there is one."""
    if len(chosen) == len(order):
        return chosen
    inside = set(chosen)
    for place, old in enumerate(chosen):
        best = old
        for new in order:
            if new not in inside and sizes[new] <= left + sizes[old] and values[new] > values[best]:
                best = new
        if best != old:
            inside.discard(old)
            inside.add(best)
            left += sizes[old] - sizes[best]
            chosen[place] = best
    return chosen


def cover(costs: Sequence[float], sizes: Sequence[int], need: int) -> list[int]:
    """Indices of items of small total cost with total size at least `need`; all of them when that is too
    little.

    Greedy by cost per size, where an item that would complete the cover is noted as one candidate and passed
    over (Gens and Levner: at most twice the optimum); from the best candidate the needless are put back,
    dearest first, and each chosen item is swapped once for a cheaper one that is still enough. For sizes 9
    and 10 with cost = size squared and need 10 the answer is the 10 alone (100), not both (181).
    """
    if need <= 0:
        return []
    usable = [index for index in range(len(sizes)) if sizes[index] > 0]
    order = sorted(usable, key=lambda index: (costs[index] / sizes[index], index))
    best = _greedy_cover(costs, sizes, need, order)
    if best is None:
        return order
    return _cheaper(costs, sizes, need, order, best)


def _greedy_cover(
    costs: Sequence[float], sizes: Sequence[int], need: int, order: list[int]
) -> list[int] | None:
    best: list[int] | None = None
    best_cost = 0.0
    kept: list[int] = []
    kept_cost, kept_size = 0.0, 0
    for index in order:
        if kept_size + sizes[index] < need:
            kept.append(index)
            kept_cost += costs[index]
            kept_size += sizes[index]
        elif best is None or kept_cost + costs[index] < best_cost:
            best, best_cost = [*kept, index], kept_cost + costs[index]
    return best


def _cheaper(
    costs: Sequence[float], sizes: Sequence[int], need: int, order: list[int], chosen: list[int]
) -> list[int]:
    spare = sum(sizes[index] for index in chosen) - need
    kept: list[int] = []
    for index in sorted(chosen, key=lambda index: (-costs[index], index)):
        if sizes[index] <= spare:
            spare -= sizes[index]
        else:
            kept.append(index)
    inside = set(kept)
    for place, old in enumerate(kept):
        best = old
        for new in order:
            if new not in inside and sizes[new] >= sizes[old] - spare and costs[new] < costs[best]:
                best = new
        if best != old:
            inside.discard(old)
            inside.add(best)
            spare += sizes[best] - sizes[old]
            kept[place] = best
    return kept
