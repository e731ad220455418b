"""Each policy against its published formula, worked out by hand."""

from collections import Counter
from typing import Any

import pytest

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, TenantId, WorkerId
from keepwarm.routing.costs import RouteCosts, sum_positions
from keepwarm.routing.dynamo import DynamoCost
from keepwarm.routing.hashing import ConsistentHash
from keepwarm.routing.keepwarm import KeepwarmCost
from keepwarm.routing.least_loaded import LeastLoaded
from keepwarm.routing.policy import RouteQuestion, WorkerView
from keepwarm.routing.saga import SagaAffinity
from keepwarm.routing.thresholds import PrefixThresholds

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def question(
    num_prompt: int = 1000, home: WorkerId | None = None, session: str = "s", tenant: str = DEFAULT_TENANT
) -> RouteQuestion:
    return RouteQuestion(
        request_id=RequestId("r"),
        num_prompt_tokens=num_prompt,
        session=(TenantId(tenant), SessionId(session)),
        home=home,
    )


def view(worker_id: WorkerId, warm: int = 0, tier: Tier = Tier.DEVICE, **facts: Any) -> WorkerView:
    return WorkerView(worker_id=worker_id, num_warm_tokens={tier: warm} if warm else {}, **facts)


def scores(decision: Decision[WorkerId]) -> dict[WorkerId, float]:
    return {other.choice: other.score for other in decision.runners_up}


def test_least_loaded_is_blind_to_warmth() -> None:
    fleet = [view(A, warm=1000, num_open_requests=2), view(B, num_open_requests=1)]
    assert LeastLoaded().choose(question(), fleet).choice == B


class TestConsistentHash:
    def test_sessions_spread_and_stay(self) -> None:
        policy, fleet = ConsistentHash(), [view(A), view(B), view(C)]
        places = {f"s{n}": policy.choose(question(session=f"s{n}"), fleet).choice for n in range(600)}
        # A fair split is 200 each; six standard deviations are 70.
        assert all(130 < count < 270 for count in Counter(places.values()).values())
        assert len(set(places.values())) == 3
        loaded = [view(A, num_open_requests=99, warm=1000), view(B), view(C)]
        assert all(
            policy.choose(question(session=name), loaded).choice == place for name, place in places.items()
        )

    def test_only_sessions_of_a_lost_worker_move(self) -> None:
        policy = ConsistentHash()
        for n in range(200):
            asked = question(session=f"s{n}")
            before = policy.choose(asked, [view(A), view(B), view(C)])
            after = policy.choose(asked, [view(A), view(C)])
            if before.choice != B:
                assert after.choice == before.choice
            else:
                assert after.choice == before.runners_up[0].choice

    def test_tenants_do_not_share_a_session(self) -> None:
        policy, fleet = ConsistentHash(), [view(A), view(B), view(C)]
        one = [policy.choose(question(session=f"s{n}"), fleet).choice for n in range(50)]
        other = [policy.choose(question(session=f"s{n}", tenant="t"), fleet).choice for n in range(50)]
        assert one != other
        # Where one name ends and the other begins matters.
        assert (
            len({_weight(tenant, session) for tenant, session in (("ab", "c"), ("a", "bc"), ("1", "1:x"))})
            == 3
        )

    def test_half_a_surrogate_pair_is_a_name_like_any_other(self) -> None:
        assert ConsistentHash().choose(question(session="\ud800"), [view(A)]).choice == A

    def test_a_full_worker_passes_on_to_the_next_in_the_sessions_order(self) -> None:
        free = ConsistentHash().choose(question(), [view(A), view(B), view(C)])
        order = [free.choice, *(other.choice for other in free.runners_up)]
        # 1.25 * (9 + 1) / 3 = 4.2: nobody may have more than 5 after this one.
        policy = ConsistentHash(load_factor=1.25)
        for num_open, expected in (((4, 5, 0), order[0]), ((5, 4, 0), order[1]), ((5, 5, 0), order[2])):
            fleet = [view(name, num_open_requests=count) for name, count in zip(order, num_open, strict=True)]
            decision = policy.choose(question(), fleet)
            assert decision.choice == expected, num_open
        assert decision.numbers["num_full"] == 2

    def test_the_bound_holds_and_somebody_always_has_room(self) -> None:
        policy = ConsistentHash(load_factor=1.0)
        num_open = Counter({A: 0, B: 0, C: 0})
        for n in range(30):
            fleet = [view(name, num_open_requests=count) for name, count in num_open.items()]
            # All calls are of one session: without the bound, one worker would have them all.
            num_open[policy.choose(question(), fleet).choice] += 1
            assert max(num_open.values()) <= -(-(n + 1) // 3)

    @pytest.mark.parametrize("load_factor", [0.99, 0.0, float("nan")])
    def test_a_bound_below_the_mean_is_refused(self, load_factor: float) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            ConsistentHash(load_factor=load_factor)


def _weight(tenant: str, session: str) -> float:
    fleet = [view(A), view(B)]
    decision = ConsistentHash().choose(question(tenant=tenant, session=session), fleet)
    return decision.runners_up[0].score


class TestPrefixThresholds:
    def test_the_longest_match_above_the_threshold_wins_against_load(self) -> None:
        fleet = [view(A), view(B, warm=310, num_open_requests=64), view(C, warm=305)]
        decision = PrefixThresholds().choose(question(), fleet)
        assert (decision.choice, decision.numbers["match"]) == (B, 0.31)

    def test_a_match_at_the_threshold_is_not_enough(self) -> None:
        fleet = [view(A, num_open_requests=1), view(B, warm=300, num_open_requests=2)]
        assert PrefixThresholds().choose(question(), fleet).choice == A

    @pytest.mark.parametrize(
        ("least", "most", "is_balanced"), [(0, 64, True), (0, 65, False), (130, 195, True), (129, 194, False)]
    )
    def test_imbalance_needs_both_thresholds(self, least: int, most: int, is_balanced: bool) -> None:
        fleet = [view(A, num_open_requests=least), view(B, warm=1000, num_open_requests=most)]
        assert PrefixThresholds().choose(question(), fleet).choice == (B if is_balanced else A)


class TestDynamoCost:
    def test_cost_in_blocks(self) -> None:
        # Prompt: 100 blocks of 10. a: 20 wait, 50 device, 20 host and 8 disk warm, 30 held.
        # Credit 50 + 15 + 2 = 67; prefill 20 + 100 - 67 = 53; decode 30 + 100; cost 183.
        fleet = [
            WorkerView(
                worker_id=A,
                num_open_prompt_tokens=200,
                num_held_tokens=300,
                num_open_requests=5,
                num_warm_tokens={Tier.DEVICE: 500, Tier.HOST: 200, Tier.DISK: 80, Tier.REMOTE: 90},
            ),
            # Prefill 100, decode 100 - and nothing else: 200.
            view(B),
            # Prefill max(100 - 100, 0), decode 150 + 100: 250.
            view(C, warm=1000, num_held_tokens=1500),
        ]
        decision = DynamoCost(block_size=10).choose(question(), fleet)
        assert (decision.choice, decision.numbers["cost"]) == (A, 183.0)
        assert scores(decision) == {B: 200.0, C: 250.0}

    def test_more_credit_than_work_is_no_discount(self) -> None:
        fleet = [view(A, warm=3000), view(B)]
        decision = DynamoCost(block_size=10).choose(question(), fleet)
        assert decision.numbers["cost"] == 100.0

    def test_knobs(self) -> None:
        # On b 100 tokens more wait than on a; the prompt is 1000: its excess is 0.1.
        fleet = [
            view(A, num_open_prompt_tokens=100),
            view(B, warm=1000, num_open_prompt_tokens=200, num_open_requests=3),
        ]
        policy = DynamoCost(block_size=10, credit_decay=10, prefill_scale=2, request_weight=4)
        # Decay 1 / 2: b: 2 * (20 + 100 - 50) + 100 + 12 = 252; a: 2 * (10 + 100) + 100.
        assert policy.choose(question(), fleet).numbers["cost"] == 252.0
        assert scores(policy.choose(question(), fleet)) == {A: 320.0}


class TestSagaAffinity:
    def test_load(self) -> None:
        # 0.5 * 32 / 64 + 0.5 * 600 / 1000 + 0.05 * 3 = 0.7
        busy: dict[str, Any] = {"num_running": 32, "num_open_requests": 35, "num_capacity_tokens": 1000}
        fleet = [view(A, num_used_tokens=600, num_held_tokens=100, **busy), view(B, num_running=1)]
        assert SagaAffinity().choose(question(home=A), fleet).numbers["load"] == 0.7
        assert SagaAffinity().choose(question(), fleet).choice == B
        assert SagaAffinity(counts_cached=False).choose(question(home=A), fleet).numbers["load"] == 0.45

    @pytest.mark.parametrize(("num_queued", "expected"), [(5, A), (6, B), (7, B)])
    def test_home_is_kept_below_the_gate_only(self, num_queued: int, expected: WorkerId) -> None:
        full: dict[str, Any] = {"num_capacity_tokens": 1000, "num_used_tokens": 1100}
        fleet = [view(A, warm=1000, num_open_requests=num_queued, **full), view(B)]
        assert SagaAffinity().choose(question(home=A), fleet).choice == expected

    def test_a_home_that_is_gone_is_none(self) -> None:
        assert SagaAffinity().choose(question(home=C), [view(A), view(B)]).choice == A


COSTS = RouteCosts(
    prefill_s_per_token=0.001,
    prefill_s_per_token_position=1e-6,
    reload_s_per_token={Tier.DEVICE: 0.0, Tier.HOST: 0.0001, Tier.DISK: 0.0005, Tier.REMOTE: 0.01},
    step_s=0.01,
)


class TestKeepwarmCost:
    def test_cost_in_seconds(self) -> None:
        fleet = [
            WorkerView(
                worker_id=A,
                num_open_prompt_tokens=100,
                sum_open_prompt_positions=20_000,
                num_open_requests=4,
                num_running=3,
                step_s=0.02,
                num_warm_tokens={Tier.DEVICE: 400, Tier.HOST: 200},
                num_held_tokens=700,
                num_capacity_tokens=1600,
            ),
            view(B, num_running=2),
        ]
        decision = KeepwarmCost(costs=COSTS).choose(question(), fleet)
        # a: wait .1 + .02 + 3 * .02; 100 tokens too many; 400 tokens at positions 600 to 999: .4 + .3198, which
        # delay one that waits.
        assert decision.choice == A
        assert decision.numbers == {
            "wait_s": 0.18,
            "room_s": 0.1,
            "prefill_s": 0.7198,
            "reload_s": 0.02,
            "delay_s": 0.7198,
            "copy_s": 0.0,
            "cost_s": 1.7396,
            "gain_s": 0.0,
        }
        # b: two steps of 10 ms; all of the prompt: 1 + .4995, and what a would not need of it once more.
        assert scores(decision) == {B: pytest.approx(0.02 + 1.4995 + (1.4995 - 0.7198))}

    def test_nobody_reloads_what_is_cheaper_to_compute(self) -> None:
        assert COSTS.reload_s({Tier.REMOTE: 100}) == pytest.approx(0.1)

    def test_positions_add_up(self) -> None:
        assert [sum_positions(first, 9) for first in range(10)] == [
            sum(range(first, 9)) for first in range(10)
        ]

    @pytest.mark.parametrize(("num_queued", "expected"), [(0, A), (1990, A), (2010, B)])
    def test_home_is_left_when_that_saves_a_quarter(self, num_queued: int, expected: WorkerId) -> None:
        # Both have all of the prompt. b takes 1.5 s; home may take 2 s.
        fleet = [
            view(A, warm=1000, num_open_prompt_tokens=num_queued),
            view(B, warm=1000, num_open_prompt_tokens=1500),
        ]
        assert KeepwarmCost(costs=COSTS).choose(question(home=A), fleet).choice == expected

    def test_a_copy_costs_more_than_its_prefill(self) -> None:
        # Home waits 1.6 s; elsewhere the prompt takes 1.4995 s to prefill: leaving pays for this call only.
        fleet = [view(A, warm=1000, num_open_prompt_tokens=1600), view(B)]
        eager = KeepwarmCost(costs=COSTS, hysteresis_s=0, hysteresis_share=0)
        assert eager.choose(question(home=A), fleet).choice == A
        blind = KeepwarmCost(costs=COSTS, hysteresis_s=0, hysteresis_share=0, copy_share=0)
        assert blind.choose(question(home=A), fleet).choice == B

    def test_a_new_session_goes_where_most_room_is(self) -> None:
        policy = KeepwarmCost(costs=COSTS)
        crowded = view(A, num_home_tokens=500, num_capacity_tokens=1000)
        roomy = view(B, num_home_tokens=400, num_capacity_tokens=1000)
        assert policy.choose(question(10), [crowded, roomy]).choice == B
        # Whatever is within a decode step counts as equal, and no more.
        one_step = view(B, num_home_tokens=400, num_capacity_tokens=1000, num_running=1)
        assert policy.choose(question(10), [crowded, one_step]).choice == B
        two_steps = view(B, num_home_tokens=400, num_capacity_tokens=1000, num_running=2)
        assert policy.choose(question(10), [crowded, two_steps]).choice == A
        held = [
            view(A, num_held_tokens=20, num_capacity_tokens=99),
            view(B, num_held_tokens=10, num_capacity_tokens=99),
        ]
        assert policy.choose(question(10), held).choice == B

    def test_room_is_only_asked_for_where_it_is_known(self) -> None:
        decision = KeepwarmCost(costs=COSTS).choose(question(), [view(A, num_held_tokens=10**9)])
        assert decision.numbers["room_s"] == 0.0
