"""The orders of the published admission policies, on cases small enough to check by hand."""

import math
from collections.abc import Hashable
from fractions import Fraction
from itertools import permutations

import pytest

from keepwarm.core.ids import RequestId, SessionId, SessionKey, TenantId, WorkerId
from keepwarm.core.request import Hints
from keepwarm.core.turns import TurnEnd
from keepwarm.workflow.admission.autellix import Atlas, AutellixSettings, Plas
from keepwarm.workflow.admission.continuum import ContinuumOrder, best_ttl_s
from keepwarm.workflow.admission.in_order import ByPriority, Fcfs
from keepwarm.workflow.admission.parrot import ParrotGang
from keepwarm.workflow.admission.pie import PieRent
from keepwarm.workflow.admission.policy import AdmissionPolicy, Verdict, WaitingCall, WorkerRoom
from keepwarm.workflow.admission.rent import CREDIT, Bank, shapley_split
from keepwarm.workflow.admission.saga import AgentFairShare
from keepwarm.workflow.admission.seats import Seat, Seating, Standing
from keepwarm.workflow.admission.thunderagent import ThunderAgent
from keepwarm.workflow.admission.weighted_fair import WeightedFair
from keepwarm.workflow.admission.working_set import WorkingSet
from keepwarm.workflow.admission.working_set_settings import WorkingSetSettings

W0 = WorkerId("w0")
NONE: list[str] = []


def key_of(session: str, tenant: str = "t") -> SessionKey:
    return (TenantId(tenant), SessionId(session))


def room(num_slots: int = 1, *, num_open: int = 1, name: str = "w0", num_tokens: int = 10_000) -> WorkerRoom:
    """A worker that is busy, with `num_slots` free slots."""
    return WorkerRoom(
        worker_id=WorkerId(name),
        num_capacity_tokens=num_tokens,
        num_free_tokens=num_tokens,
        num_free_slots=num_slots,
        num_open_requests=num_open,
    )


class Desk:
    """Talks to a policy in few words."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self.calls: dict[str, WaitingCall] = {}

    def call(
        self,
        name: str,
        now_s: float = 0.0,
        *,
        session: str = "",
        workflow: str = "",
        parent: str = "",
        tenant: str = "t",
        num_tokens: int = 100,
        hints: Hints | None = None,
    ) -> None:
        key = key_of(session or name, tenant)
        call = WaitingCall(
            request_id=RequestId(name),
            session=key,
            workflow=key_of(workflow, tenant) if workflow else key,
            arrival_s=now_s,
            num_prompt_tokens=num_tokens,
            parent=key_of(parent, tenant) if parent else None,
            hints=hints or Hints(),
        )
        self.calls[name] = call
        self.policy.on_call(call, now_s)

    def verdict(self, *rooms: WorkerRoom, now_s: float = 0.0) -> Verdict:
        verdict = self.policy.decide(rooms or (room(),), now_s)
        for release in verdict.releases:
            self.policy.on_placed(release.choice.request_id, release.choice.worker_id or W0, now_s)
        return verdict

    def goes(self, *rooms: WorkerRoom, now_s: float = 0.0) -> list[str]:
        return [str(release.choice.request_id) for release in self.verdict(*rooms, now_s=now_s).releases]

    def end(self, name: str, service_s: float = 1.0, now_s: float = 0.0, num_tokens: int = 0) -> None:
        call = self.calls[name]
        turn = TurnEnd(
            session=call.session, num_prompt_tokens=num_tokens or call.num_prompt_tokens, tools=("Bash",)
        )
        self.policy.on_ended(RequestId(name), turn, service_s, now_s)

    def run(self, name: str, service_s: float = 1.0, now_s: float = 0.0, **more: str) -> None:
        """A whole call."""
        self.call(name, now_s, **more)  # type: ignore[arg-type]
        assert self.goes(now_s=now_s) == [name]
        self.end(name, service_s, now_s)


def test_fcfs_holds_nobody_back() -> None:
    desk = Desk(Fcfs())
    for name in "abc":
        desk.call(name)
    assert desk.goes(room(0, num_open=9)) == ["a", "b", "c"]


def test_the_head_waits_for_room_and_nobody_passes_it() -> None:
    desk = Desk(ByPriority())
    desk.call("large", num_tokens=500)
    desk.call("small", 1.0, num_tokens=10)
    assert desk.goes(room(4, num_tokens=400)) == NONE
    assert desk.goes(room(0)) == NONE
    assert desk.goes(room(4, num_tokens=510)) == ["large", "small"]


def test_priority_is_seconds_and_strict_priority_a_tier() -> None:
    desk = Desk(ByPriority())
    desk.call("early", 0.0)
    desk.call("urgent", 5.0, hints=Hints(priority=6))
    desk.call("late", 6.0, hints=Hints(priority=1))
    desk.call("tier", 9.0, hints=Hints(strict_priority=1))
    assert [desk.goes(now_s=9.0) for _ in range(4)] == [["tier"], ["urgent"], ["early"], ["late"]]


def test_plas_prefers_programs_that_have_had_little() -> None:
    desk = Desk(Plas())
    desk.run("a1", 100.0, workflow="a")
    desk.call("a2", workflow="a")
    desk.call("b1", workflow="b")
    assert [desk.goes(), desk.goes()] == [["b1"], ["a2"]]


def test_plas_takes_the_longest_of_parallel_calls_and_the_sum_of_sequential_ones() -> None:
    policy = Plas()
    desk = Desk(policy)
    desk.run("first", 2.0, workflow="p")
    for name in ("left", "right"):
        desk.call(name, workflow="p")
        desk.goes()
    desk.end("left", 3.0)
    desk.end("right", 5.0)
    assert policy.service_s(key_of("p")) == 7.0
    desk.run("join", 1.0, workflow="p")
    assert policy.service_s(key_of("p")) == 8.0


def test_atlas_places_a_thread_by_its_own_chain() -> None:
    """A sub-agent that starts late in a long program stands where its parent stood, not behind its siblings."""
    desk = Desk(Atlas(AutellixSettings(first_bound_s=2.0)))
    desk.run("root1", 1.0, session="root", workflow="root")
    desk.run("long1", 50.0, session="long", workflow="root", parent="root")
    desk.run("short1", 9.0, session="short", workflow="root")
    desk.call("root2", session="root", workflow="root")
    desk.call("short2", session="short", workflow="root")
    desk.call("fork1", session="other", workflow="root", parent="nobody")
    order = [desk.goes()[0] for _ in range(3)]
    assert order == ["fork1", "short2", "root2"], "the parent waits behind its longest child"
    plas = Desk(Plas(AutellixSettings(first_bound_s=2.0)))
    plas.run("root1", 51.0, session="root", workflow="root")
    plas.call("fork1", session="other", workflow="root")
    plas.call("new", workflow="new")
    assert plas.goes() == ["new"], "one number for the whole program"


def test_queue_bounds_are_geometric() -> None:
    settings = AutellixSettings(num_queues=4, first_bound_s=1.0, bound_factor=4.0)
    assert [settings.queue_of(s) for s in (0.0, 0.9, 1.0, 3.9, 4.0, 16.0, 1e9)] == [0, 0, 1, 1, 2, 3, 3]


def test_a_call_that_starves_is_promoted_at_the_published_ratio() -> None:
    """`(W_prog + W_call) / (T_prog + T_call) >= beta`: after 10 s of service and beta 5, at 50 s of waiting."""
    desk = Desk(Plas(AutellixSettings(beta=5.0)))
    desk.run("old1", 10.0, workflow="old")
    desk.call("old2", 0.0, workflow="old")
    desk.call("new1", 49.0)
    assert desk.goes(now_s=49.0) == ["new1"]
    desk.call("new2", 51.0)
    assert desk.goes(now_s=51.0) == ["old2"]


def test_a_gang_goes_together_and_a_lone_call_waits_its_turn() -> None:
    desk = Desk(ParrotGang())
    desk.call("map1", 0.0, workflow="p")
    desk.call("lone", 1.0)
    desk.call("map2", 2.0, workflow="p")
    desk.call("map3", 3.0, workflow="p")
    assert desk.goes(room(0), now_s=3.0) == NONE
    assert desk.goes(room(2), now_s=3.0) == ["map1", "map2", "map3"]
    assert desk.goes(room(1), now_s=3.0) == ["lone"]


def test_continuum_prefers_who_is_back_in_time_then_the_older_program() -> None:
    policy = ContinuumOrder(prefill_s_per_token=0.1)
    desk = Desk(policy)
    desk.run("late1", now_s=0.0, session="late", workflow="late")
    desk.run("back1", now_s=1.0, session="back", workflow="back")
    assert policy.ttl_s("Bash", 100) == pytest.approx(math.log(10.0))
    desk.call("new", 2.0)
    desk.call("back2", 2.5, session="back", workflow="back")
    desk.call("late2", 9.0, session="late", workflow="late")
    assert [desk.goes(now_s=9.0) for _ in range(3)] == [["back2"], ["late2"], ["new"]]


def test_continuum_ttl_is_the_best_of_all_durations() -> None:
    durations_s = sorted([0.5, 1.0, 1.0, 2.0, 8.0, 30.0])
    for benefit_s in (0.1, 1.0, 3.0, 10.0, 100.0):
        gains = {0.0: 0.0}
        for tau in durations_s:
            gains[tau] = sum(d <= tau for d in durations_s) / len(durations_s) * benefit_s - tau
        best_s = best_ttl_s(durations_s, benefit_s)
        assert gains[best_s] == max(gains.values())


def thunder(*sizes: int) -> Desk:
    """Programs `p0`, `p1`, ... that have made a call of so many tokens each, on a worker of 1,000."""
    desk = Desk(ThunderAgent())
    for number, size in enumerate(sizes):
        desk.call(f"p{number}.1", session=f"p{number}", num_tokens=size)
        assert desk.goes(BIG) == [f"p{number}.1"]
        desk.end(f"p{number}.1", num_tokens=size)
    return desk


BIG = room(8, num_tokens=1000)


def active_tokens(desk: Desk) -> float:
    assert isinstance(desk.policy, ThunderAgent)
    return desk.policy.num_active_tokens(W0)


def test_thunderagent_starts_a_new_program_only_when_it_fits_and_nobody_waits() -> None:
    desk = thunder(100, 100)
    desk.call("big", num_tokens=600)
    assert desk.goes(BIG) == NONE
    desk.call("small", num_tokens=10)
    assert desk.goes(BIG, now_s=1.0) == NONE, "somebody waits already"
    assert desk.goes(BIG, now_s=5.0) == ["big", "small"], "at the next check the acting ones hardly count"


def test_thunderagent_pauses_the_smallest_acting_program_until_the_rest_fits() -> None:
    desk = thunder(100, 200, 250)
    desk.call("p2.2", session="p2", num_tokens=300)
    desk.goes(BIG)
    desk.policy.on_grown(RequestId("p2.2"), 600, 1.0)
    assert not desk.verdict(BIG, now_s=4.0).pauses, "between checks nothing happens"
    verdict = desk.verdict(BIG, now_s=5.0)
    assert [pause.choice[1] for pause in verdict.pauses] == ["p0"]
    assert active_tokens(desk) <= 1000


def test_thunderagent_marks_the_smallest_reasoning_program_when_no_acting_one_is_left() -> None:
    desk = thunder(100, 200)
    for name in ("p0", "p1"):
        desk.call(f"{name}.2", session=name, num_tokens=300)
        desk.goes(BIG)
    desk.policy.on_grown(RequestId("p1.2"), 700, 1.0)
    assert not desk.verdict(BIG, now_s=5.0).pauses
    assert active_tokens(desk) == 800
    desk.end("p0.2", now_s=6.0, num_tokens=310)
    assert [pause.choice[1] for pause in desk.verdict(BIG, now_s=6.0).pauses] == ["p0"]


def test_thunderagent_counts_acting_programs_less_and_less_when_others_want_in() -> None:
    desk = thunder(700)
    desk.call("new", 1.0, num_tokens=700)
    assert desk.goes(BIG, now_s=1.0) == NONE
    assert desk.goes(BIG, now_s=6.0) == ["new"], "2^-6 of the acting program is left"


def test_thunderagent_forces_a_resume_after_half_an_hour() -> None:
    desk = thunder(100)
    desk.call("p0.2", session="p0", num_tokens=500)
    desk.goes(BIG)
    desk.call("huge", 0.0, num_tokens=950)
    for now_s in (5.0, 900.0, 1790.0):
        assert desk.goes(BIG, now_s=now_s) == NONE
    assert desk.goes(BIG, now_s=1800.0) == ["huge"]


def test_thunderagent_resumes_smallest_first_until_the_next_does_not_fit() -> None:
    desk = thunder(100)
    desk.call("p0.2", session="p0", num_tokens=100)
    desk.goes(BIG)
    for name, size in (("big", 550), ("small", 100), ("middle", 150)):
        desk.call(name, num_tokens=size)
    desk.call("huge", num_tokens=5000)
    assert desk.goes(BIG, now_s=1.0) == NONE
    assert sorted(desk.goes(BIG, now_s=5.0)) == ["middle", "small"]


def test_thunderagent_places_the_largest_on_the_emptiest_backend() -> None:
    desk = thunder(500)
    two = (BIG, room(8, num_tokens=1000, name="w1"))
    desk.call("p0.2", session="p0", num_tokens=500)
    desk.goes(*two)
    desk.call("blocker", num_tokens=950)
    desk.goes(room(8, num_tokens=1000))
    for name, size in (("small", 200), ("medium", 300)):
        desk.call(name, num_tokens=size)
    desk.policy.on_cancelled(RequestId("blocker"), 1.0)
    verdict = desk.verdict(*two, now_s=10.0)
    assert {r.choice.request_id: r.choice.worker_id for r in verdict.releases} == {
        "medium": "w1",
        "small": "w1",
    }


def test_working_set_gives_no_memory_to_who_is_ahead_while_another_waits_for_it() -> None:
    desk = Desk(WorkingSet(WorkingSetSettings(first_overcommit=1.0)))
    busy = room(4, num_tokens=4000)
    for name in ("a1", "a2"):
        desk.call(name, tenant="ahead", num_tokens=1200)
        assert desk.goes(busy) == [name]
    desk.end("a1", 1000.0)
    desk.policy.on_session_closed(desk.calls["a1"].session, 0.0)
    desk.call("b1", 1.0, tenant="owed", num_tokens=2400)
    desk.call("a3", 1.0, tenant="ahead", num_tokens=50)
    assert desk.goes(busy, now_s=1.0) == NONE, "the small call fits, and stands back"
    desk.end("a2", 1.0, 2.0)
    desk.policy.on_session_closed(desk.calls["a2"].session, 2.0)
    assert desk.goes(busy, now_s=2.0) == ["b1", "a3"]


def test_working_set_takes_sessions_in_mid_task_before_new_ones() -> None:
    desk = Desk(WorkingSet(WorkingSetSettings(first_overcommit=1.0)))
    desk.call("old1", session="old")
    assert desk.goes(room(4, num_tokens=4000)) == ["old1"]
    desk.end("old1")
    other = room(4, num_tokens=4000, name="w1")
    desk.call("big", num_tokens=2000)
    assert desk.goes(other) == ["big"]
    desk.call("old2", 1.0, session="old", num_tokens=2000)
    desk.call("new", 1.0, num_tokens=50)
    assert desk.goes(other, now_s=1.0) == NONE, "its worker is gone, and it does not fit; the new one would"
    desk.end("big", now_s=2.0)
    desk.policy.on_session_closed(desk.calls["big"].session, 2.0)
    assert desk.goes(other, now_s=2.0) == ["old2", "new"]


def test_a_worker_that_comes_back_owes_nothing_for_its_guests() -> None:
    seating = Seating(lambda session, idle_s: 1.0, WeightedFair())
    guest = Seat(key_of("guest"), num_calls=1)
    seating.need(guest, 500, 0.0)
    seating.place(guest, Standing.GUEST, W0, 0.0)
    assert seating.desk(W0).num_guest_tokens == 500
    assert seating.forget_worker(W0, 1.0) == [guest]
    seating.desk(W0)
    seating.place(guest, Standing.OUT, None, 2.0)
    assert seating.desk(W0).num_guest_tokens == 0


def test_saga_sends_a_session_home_unless_home_is_loaded() -> None:
    desk = Desk(AgentFairShare())
    two = (room(4, name="w0", num_open=1), room(4, name="w1", num_open=0))
    desk.call("a1", session="a", workflow="a")
    (first,) = desk.verdict(*two).releases
    assert first.choice.worker_id == "w1", "the less loaded"
    desk.end("a1")
    quiet = (room(4, name="w0", num_open=0), room(3, name="w1", num_open=1))
    desk.call("a2", session="a", workflow="a")
    assert desk.verdict(*quiet).releases[0].choice.worker_id == "w1", "home, although busier"
    desk.end("a2")
    full = WorkerRoom(
        worker_id=WorkerId("w1"),
        num_capacity_tokens=10_000,
        num_free_tokens=100,
        num_free_slots=0,
        num_open_requests=4,
    )
    desk.call("a3", session="a", workflow="a")
    assert desk.verdict(room(4, name="w0", num_open=0), full).releases[0].choice.worker_id == "w0"


def test_saga_lets_an_idle_worker_steal_the_oldest_of_the_longest_line() -> None:
    desk = Desk(AgentFairShare())
    busy = (room(0, name="w0", num_open=1), room(0, name="w1", num_open=4))
    desk.call("h1", session="h", workflow="h")
    assert desk.goes(room(1, name="w0", num_open=0)) == ["h1"]
    for name in ("h2", "h3"):
        desk.call(name, session="h", workflow="h")
    desk.goes(*busy)
    verdict = desk.verdict(room(0, name="w0", num_open=1), room(4, name="w1", num_open=0), now_s=1.0)
    assert [(r.choice.request_id, r.choice.worker_id) for r in verdict.releases] == [("h2", "w1")]


def test_saga_serves_the_tenant_with_more_work_and_less_time_more_often() -> None:
    desk = Desk(AgentFairShare())
    for number in range(12):
        desk.call(f"few{number}", session="few", workflow="few", tenant="few")
        desk.call(f"many{number}", session=f"m{number}", workflow=f"m{number}", tenant="many")
    order = [desk.goes(now_s=0.2)[0] for _ in range(8)]
    assert sum(name.startswith("many") for name in order) >= 6


def test_pie_conserves_money_through_rent_auction_and_dividends() -> None:
    policy = PieRent()
    desk = Desk(policy)
    for number in range(6):
        desk.call(f"c{number}.1", float(number), session=f"c{number}", num_tokens=500 * (number + 1))
        desk.goes(now_s=float(number))
        desk.end(f"c{number}.1", now_s=float(number))
    for round_number in range(2, 30):
        now_s = 10.0 * round_number
        for number in range(6):
            desk.call(f"c{number}.{round_number}", now_s, session=f"c{number}", num_tokens=500 * (number + 1))
        for _ in range(6):
            for name in desk.goes(now_s=now_s):
                desk.end(name, now_s=now_s)
    policy.on_session_closed(key_of("c3"), 400.0)
    bank = policy.bank
    assert bank.paid > 0
    assert bank.dividends > 0
    assert sum(bank.balances.values()) == bank.endowments - bank.withdrawn - bank.paid + bank.dividends
    assert bank.pot == bank.paid - bank.dividends
    assert key_of("c3") not in bank.balances


def test_pie_charges_rent_by_tokens_and_ticks() -> None:
    policy = PieRent()
    desk = Desk(policy)
    for name, size in (("small", 1000), ("large", 3000)):
        desk.call(f"{name}.1", session=name, num_tokens=size)
        assert desk.goes() == [f"{name}.1"]
    desk.call("late", 10.0)
    desk.goes(now_s=10.0)
    full_price = CREDIT // 100
    assert policy.bank.paid == 10 * (1000 + 3000) * full_price * 4000 // (1000 * 10_000)
    small, large = (policy.bank.balances[key_of(name)] for name in ("small", "large"))
    assert small - large == 10 * 2 * full_price * 4000 // 10_000


def test_pie_sells_a_slot_to_the_highest_bid_at_the_second_price() -> None:
    policy = PieRent()
    desk = Desk(policy)
    desk.call("dear", num_tokens=2000)
    desk.call("cheap", num_tokens=1000)
    assert desk.goes() == ["cheap"]
    assert policy.bank.paid == 1000 * (1000 * CREDIT // (2 * 2000))


def test_an_account_pays_only_what_it_has() -> None:
    bank = Bank()
    bank.open("a", 5)
    assert bank.pay("a", 9) == 5
    assert bank.pay("stranger", 9) == 0
    bank.open("b", 3)
    bank.share_out()
    assert bank.balances == {"a": 2, "b": 5}
    assert bank.pot == 1


def test_shapley_split_of_shared_pages_equals_the_mean_over_all_orders() -> None:
    pages: dict[Hashable, list[tuple[Hashable, int]]] = {
        "a": [("system", 60), ("a1", 10)],
        "b": [("system", 60), ("tools", 30)],
        "c": [("system", 60), ("tools", 30), ("c1", 7)],
        "d": [("alone", 5)],
    }
    expected = dict.fromkeys(pages, Fraction(0))
    orders = list(permutations(pages))
    for order in orders:
        seen: set[Hashable] = set()
        for holder in order:
            new = {page: size for page, size in pages[holder] if page not in seen}
            expected[holder] += Fraction(sum(new.values()), len(orders))
            seen.update(new)
    split = shapley_split(pages)
    assert split == expected
    assert sum(split.values()) == 60 + 10 + 30 + 7 + 5
