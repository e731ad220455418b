"""Overcommit: grows while room is short and nothing is computed twice, shrinks once sessions push each other
out."""

from keepwarm.workflow.admission.overcommit import Overcommit


def fed(overcommit: Overcommit, num_calls: int, recomputed: int, *, is_binding: bool = True) -> float:
    for _ in range(num_calls):
        overcommit.on_call(10_000, recomputed, is_binding=is_binding)
    return overcommit.factor


def test_it_grows_only_while_room_is_short() -> None:
    assert fed(Overcommit(1.5, 100.0), 100, 0, is_binding=False) == 1.5
    assert fed(Overcommit(1.5, 100.0), 100, 0) > 3.0
    assert fed(Overcommit(1.5, 2.0), 1000, 0) == 2.0


def test_it_shrinks_faster_than_it_grows_and_not_below_the_memory() -> None:
    overcommit = Overcommit(4.0, 100.0)
    assert fed(overcommit, 16, 5_000) < 4.0
    assert fed(overcommit, 400, 5_000) == 1.0


def test_one_reduction_waits_for_its_effect() -> None:
    overcommit = Overcommit(4.0, 100.0)
    factors = {fed(overcommit, 1, 5_000) for _ in range(31)}
    assert len(factors) == 2


def test_a_little_recomputation_changes_nothing() -> None:
    assert fed(Overcommit(2.0, 100.0), 100, 200) == 2.0


def test_lower_tiers_count_once_as_first_guess() -> None:
    overcommit = Overcommit(1.5, 100.0)
    overcommit.on_memory(1000, 3000)
    assert overcommit.factor == 6.0
    overcommit.on_memory(1000, 3000)
    assert overcommit.factor == 6.0
