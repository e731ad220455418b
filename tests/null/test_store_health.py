"""A tier that fails is taken out, tried again after growing pauses, one move at a time, and put back."""

from keepwarm.store.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, TierHealth


def fail_when_tried(health: TierHealth, now_s: float) -> float:
    """Send one move at `now_s`, which fails at once; returns the length of the pause that follows."""
    assert health.may_use(now_s)
    health.on_sent()
    health.on_failure(now_s, "refused")
    assert health.out_until_s is not None
    return health.out_until_s - now_s


def test_in_service_anything_may_be_sent() -> None:
    health = TierHealth()
    health.on_sent()
    health.on_sent()
    assert health.may_use(0.0)
    assert not health.is_out


def test_a_failure_takes_it_out_for_a_pause_and_then_one_move_is_let_through() -> None:
    health = TierHealth()
    assert fail_when_tried(health, 10.0) == FIRST_PAUSE_S
    assert (health.is_out, health.last_error, health.num_failures) == (True, "refused", 1)
    assert not health.may_use(10.0 + FIRST_PAUSE_S - 0.001)
    assert health.may_use(10.0 + FIRST_PAUSE_S)
    health.on_sent()
    assert not health.may_use(1000.0), "one at a time"
    health.on_success()
    assert not health.is_out
    health.on_sent()
    assert health.may_use(1000.0)


def test_pauses_double_up_to_a_limit_and_success_starts_them_anew() -> None:
    health, now_s, pauses = TierHealth(), 0.0, []
    for _ in range(8):
        pauses.append(fail_when_tried(health, now_s))
        now_s += pauses[-1]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    health.on_success()
    assert fail_when_tried(health, now_s) == FIRST_PAUSE_S
    assert health.num_failures == 9, "counted since the start"


def test_failures_of_moves_sent_before_it_was_taken_out_do_not_lengthen_the_pause() -> None:
    health = TierHealth()
    for _ in range(3):
        health.on_sent()
    for at_s in (1.0, 1.1, 1.2):
        health.on_failure(at_s, "gone")
    assert health.out_until_s == 1.0 + FIRST_PAUSE_S
    assert health.num_failures == 3


def test_a_trial_that_was_cancelled_leaves_the_next_one_free_to_try() -> None:
    health = TierHealth()
    fail_when_tried(health, 0.0)
    health.on_sent()
    assert not health.may_use(5.0)
    health.on_withdrawn()
    assert health.is_out, "it told nothing"
    assert health.may_use(5.0)
