"""KeepwarmCost under any facts: it stays, it leaves when it should, and it errs by no more than it says."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import Tier
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, WorkerId
from keepwarm.routing.costs import RouteCosts
from keepwarm.routing.keepwarm import KeepwarmCost
from keepwarm.routing.policy import RouteQuestion, WorkerView

NAMES = [WorkerId(name) for name in "abcd"]
COSTS = RouteCosts(prefill_s_per_token=0.001, prefill_s_per_token_position=1e-8, step_s=0.02)

homes = st.sampled_from([None, *NAMES])
policies = st.builds(
    KeepwarmCost,
    costs=st.just(COSTS),
    copy_share=st.sampled_from([0.0, 0.5, 1.0]),
    hysteresis_share=st.sampled_from([0.0, 0.25, 0.5]),
    hysteresis_s=st.sampled_from([0.0, 0.05, 1.0]),
)
# Few and close values, so that ties and near misses are common.
tokens = st.one_of(st.integers(0, 60), st.integers(0, 5000), st.integers(0, 100_000))
worker_views = st.builds(
    WorkerView,
    worker_id=st.just(NAMES[0]),
    num_open_requests=st.integers(0, 8),
    num_open_prompt_tokens=tokens,
    sum_open_prompt_positions=st.sampled_from([0, 10**6]),
    num_warm_tokens=st.dictionaries(st.sampled_from([Tier.DEVICE, Tier.HOST]), tokens),
    num_running=st.integers(0, 5),
    num_held_tokens=tokens,
    num_home_tokens=tokens,
    num_capacity_tokens=st.sampled_from([0, 1000, 100_000]),
    step_s=st.sampled_from([0.0, 0.01]),
)
fleets = st.lists(worker_views, min_size=2, max_size=4).map(
    lambda views: [replace(view, worker_id=name) for name, view in zip(NAMES, views, strict=False)]
)


def question(num_prompt: int, home: WorkerId | None) -> RouteQuestion:
    session = (DEFAULT_TENANT, SessionId("s"))
    return RouteQuestion(request_id=RequestId("r"), num_prompt_tokens=num_prompt, session=session, home=home)


def judge(
    policy: KeepwarmCost, asked: RouteQuestion, fleet: Sequence[WorkerView]
) -> tuple[WorkerId, dict[WorkerId, float]]:
    """The choice, and what each worker costs in seconds."""
    decision = policy.choose(asked, fleet)
    costs_s = {other.choice: other.score for other in decision.runners_up}
    costs_s[decision.choice] = float(decision.numbers["cost_s"])
    return decision.choice, costs_s


def slack_s(policy: KeepwarmCost, cost_s: float) -> float:
    """How much more than the cheapest a choice that costs `cost_s` may cost."""
    return max(policy.hysteresis_s, policy.hysteresis_share * cost_s, policy.costs.step_s)


@given(policy=policies, fleet=fleets, num_prompt=tokens, home=homes)
def test_the_choice_is_never_much_worse_than_the_cheapest(
    policy: KeepwarmCost, fleet: list[WorkerView], num_prompt: int, home: WorkerId | None
) -> None:
    choice, costs_s = judge(policy, question(num_prompt, home), fleet)
    assert costs_s[choice] - min(costs_s.values()) <= slack_s(policy, costs_s[choice]) + 1e-6
    if choice != home:
        # Who moves, moves to about the cheapest.
        assert costs_s[choice] - min(costs_s.values()) <= policy.costs.step_s + 1e-6


@given(policy=policies, fleet=fleets, num_prompt=tokens, home=homes)
def test_home_is_left_exactly_when_that_saves_enough(
    policy: KeepwarmCost, fleet: list[WorkerView], num_prompt: int, home: WorkerId | None
) -> None:
    choice, costs_s = judge(policy, question(num_prompt, home), fleet)
    if home not in costs_s:
        return
    gain_s = costs_s[home] - min(costs_s.values())
    if gain_s <= max(policy.hysteresis_s, policy.hysteresis_share * costs_s[home]):
        assert choice == home
    elif gain_s > policy.costs.step_s + 1e-6:
        assert choice != home


@given(
    policy=policies,
    pairs=st.lists(st.tuples(worker_views, worker_views), min_size=2, max_size=4),
    num_prompt=tokens,
    home=homes,
)
def test_wrong_facts_cost_at_most_twice_their_error(
    policy: KeepwarmCost,
    pairs: list[tuple[WorkerView, WorkerView]],
    num_prompt: int,
    home: WorkerId | None,
) -> None:
    named = [
        (replace(true, worker_id=name), replace(seen, worker_id=name))
        for name, (true, seen) in zip(NAMES, pairs, strict=False)
    ]
    asked = question(num_prompt, home)
    choice, seen_s = judge(policy, asked, [seen for _, seen in named])
    _, true_s = judge(policy, asked, [true for true, _ in named])
    error_s = max(abs(true_s[name] - seen_s[name]) for name in true_s)
    assert true_s[choice] - min(true_s.values()) <= slack_s(policy, seen_s[choice]) + 2 * error_s + 1e-6


@given(data=st.data(), policy=policies, fleet=fleets, num_prompt=st.integers(1, 100_000), home=homes)
def test_who_gets_warmer_or_less_busy_is_not_refused_for_it(
    data: st.DataObject,
    policy: KeepwarmCost,
    fleet: list[WorkerView],
    num_prompt: int,
    home: WorkerId | None,
) -> None:
    asked = question(num_prompt, home)
    better_id = policy.choose(asked, fleet).choice
    better = [_improved(data, view, num_prompt) if view.worker_id == better_id else view for view in fleet]
    assert policy.choose(asked, better).choice == better_id


@given(data=st.data(), policy=policies, fleet=fleets, num_prompt=st.integers(1, 100_000), home=homes)
def test_who_gets_colder_or_busier_is_not_chosen_for_it(
    data: st.DataObject,
    policy: KeepwarmCost,
    fleet: list[WorkerView],
    num_prompt: int,
    home: WorkerId | None,
) -> None:
    asked = question(num_prompt, home)
    worse_id = data.draw(st.sampled_from([view.worker_id for view in fleet]))
    improved = [_improved(data, view, num_prompt) if view.worker_id == worse_id else view for view in fleet]
    if policy.choose(asked, improved).choice != worse_id:
        assert policy.choose(asked, fleet).choice != worse_id


def _improved(data: st.DataObject, view: WorkerView, num_prompt: int) -> WorkerView:
    """The same worker with more of the prompt warm, or less to do."""

    def less(number: int) -> int:
        return data.draw(st.integers(0, number))

    num_running = less(view.num_running)
    num_waiting = less(max(view.num_open_requests - view.num_running, 0))
    warm = dict(view.num_warm_tokens)
    more = less(max(num_prompt - sum(warm.values()), 0))
    tier = data.draw(st.sampled_from([Tier.DEVICE, Tier.HOST]))
    return replace(
        view,
        num_warm_tokens={**warm, tier: warm.get(tier, 0) + more},
        num_open_requests=min(num_running + num_waiting, view.num_open_requests),
        num_open_prompt_tokens=less(view.num_open_prompt_tokens),
        num_running=num_running,
        num_held_tokens=less(view.num_held_tokens),
        num_home_tokens=less(view.num_home_tokens),
    )


def num_moves(
    policy: KeepwarmCost,
    queued: Sequence[int],
    noise: Sequence[Sequence[int]],
    home: WorkerId | None,
    num_warm: int,
) -> int:
    """How often a session of many calls moves when the queues stay as they are and only look different each time.

    At first all workers have `num_warm` tokens of its prompt; who ran a call has all of it from then on.
    """
    moves, warm, num_prompt = 0, dict.fromkeys(NAMES, num_warm), 500
    for errors in noise:
        fleet = [
            WorkerView(
                worker_id=name,
                num_open_prompt_tokens=count + error,
                num_warm_tokens={Tier.DEVICE: warm[name]},
            )
            for name, count, error in zip(NAMES, queued, errors, strict=True)
        ]
        choice = policy.choose(question(num_prompt, home), fleet).choice
        moves += home is not None and choice != home
        home, warm[choice] = choice, num_prompt
    return moves


queues = st.lists(st.one_of(st.integers(0, 300), st.just(100), st.integers(0, 5000)), min_size=4, max_size=4)
errors = st.lists(st.lists(st.integers(0, 100), min_size=4, max_size=4), min_size=2, max_size=12)


@given(
    queued=queues,
    noise=errors,
    home=homes,
    share=st.sampled_from([0.0, 0.25]),
    num_warm=st.sampled_from([0, 490, 500]),
)
def test_a_session_moves_at_most_once_under_noise_below_the_hysteresis(
    queued: list[int], noise: list[list[int]], home: WorkerId | None, share: float, num_warm: int
) -> None:
    # Noise of 0.1 s (100 tokens) per queue moves a difference by 0.1 s. Who moves lands within noise and a step of
    # the cheapest; to leave again, noise must look like more than noise, a step and noise once more.
    policy = KeepwarmCost(costs=COSTS, hysteresis_s=0.1 + 0.02 + 0.1, hysteresis_share=share)
    assert num_moves(policy, queued, noise, home, num_warm) <= (0 if home is None else 1)


@pytest.mark.parametrize(("hysteresis_s", "expected"), [(0.0, 49), (0.22, 0)])
def test_the_same_noise_makes_a_session_flap_without_hysteresis(hysteresis_s: float, expected: int) -> None:
    noise = [[100 * (n % 2), 100 * (1 - n % 2), 999, 999] for n in range(50)]
    policy = KeepwarmCost(costs=COSTS, hysteresis_s=hysteresis_s, hysteresis_share=0.0, copy_share=0.0)
    assert num_moves(policy, [1000, 1000, 5000, 5000], noise, None, num_warm=500) == expected
