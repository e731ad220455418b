"""What every routing policy must do, whatever it prefers."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import Tier
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ConfigurationError
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, WorkerId
from keepwarm.observe.record import decision_line
from keepwarm.routing.by_name import ROUTING_NAMES, routing_of
from keepwarm.routing.policy import RouteQuestion, RoutingPolicy, WorkerView

NAMES = [WorkerId(name) for name in ("w0", "w1", "w10", "w2", "x")]
BLIND_TO_LOAD = ("round-robin", "consistent-hash")

every_policy = pytest.mark.parametrize("name", ROUTING_NAMES)


def question(num_prompt_tokens: int = 1000, **more: Any) -> RouteQuestion:
    more.setdefault("session", (DEFAULT_TENANT, SessionId("s")))
    return RouteQuestion(request_id=RequestId("r"), num_prompt_tokens=num_prompt_tokens, **more)


questions = st.builds(
    question,
    st.integers(0, 200_000),
    session=st.tuples(st.just(DEFAULT_TENANT), st.text(max_size=3).map(SessionId)),
    home=st.sampled_from([None, WorkerId("gone"), *NAMES]),
    now_s=st.floats(0, 1e6),
)


@st.composite
def worker_views(draw: st.DrawFn, worker_id: WorkerId) -> WorkerView:
    """Facts that need not agree with each other: they may be stale."""
    few, many = st.integers(0, 200), st.integers(0, 300_000)
    return WorkerView(
        worker_id=worker_id,
        num_open_requests=draw(few),
        num_open_prompt_tokens=draw(many),
        sum_open_prompt_positions=draw(st.integers(0, 10**10)),
        num_warm_tokens=draw(st.dictionaries(st.sampled_from(Tier), many, max_size=4)),
        num_running=draw(few),
        num_held_tokens=draw(many),
        num_used_tokens=draw(many),
        num_home_tokens=draw(many),
        num_capacity_tokens=draw(many),
        step_s=draw(st.sampled_from([0.0, 0.01, 2.0])),
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    return [draw(worker_views(name)) for name in names]


def ask(policy: RoutingPolicy, what: RouteQuestion, fleet: Sequence[WorkerView]) -> Decision[WorkerId]:
    """The choice of `policy`, well formed."""
    decision = policy.choose(what, fleet)
    line = json.loads(decision_line(what.now_s, decision))
    assert (line["kind"], line["subject"]) == ("route", what.request_id)
    name, _, version = decision.policy.partition("@")
    assert name
    assert version.isdigit()
    assert decision.policy == policy.name
    assert decision.reason
    assert decision.numbers
    assert all(math.isfinite(value) for value in decision.numbers.values() if not isinstance(value, str))
    assert all(math.isfinite(other.score) for other in decision.runners_up)
    ranked = [decision.choice, *(other.choice for other in decision.runners_up)]
    assert sorted(ranked) == sorted(worker.worker_id for worker in fleet)
    return decision


@every_policy
@settings(max_examples=30)
@given(stream=st.lists(st.tuples(questions, fleets()), min_size=1, max_size=3), data=st.data())
def test_it_repeats_itself_in_any_order_of_workers(
    name: str, stream: list[tuple[RouteQuestion, list[WorkerView]]], data: st.DataObject
) -> None:
    one, other = routing_of(name), routing_of(name)
    for what, fleet in stream:
        shuffled = data.draw(st.permutations(fleet))
        assert ask(one, what, fleet) == ask(other, what, shuffled)


@every_policy
@settings(max_examples=30)
@given(what=questions, view=worker_views(NAMES[0]))
def test_equal_workers_are_taken_in_order_of_id(name: str, what: RouteQuestion, view: WorkerView) -> None:
    fleet = [replace(view, worker_id=worker_id) for worker_id in reversed(NAMES)]
    # Affinity is not a tie: whoever stays at home was not chosen by id.
    decision = ask(routing_of(name), replace(what, home=None), fleet)
    if name != "consistent-hash":
        assert decision.choice == "w0"
        assert [other.choice for other in decision.runners_up] == ["w1", "w10", "w2", "x"]


@pytest.mark.parametrize("name", [name for name in ROUTING_NAMES if name not in BLIND_TO_LOAD])
@pytest.mark.parametrize("num_less", [1, 40, 180])
def test_load_comes_before_id(name: str, num_less: int) -> None:
    busy = WorkerView(worker_id=NAMES[0], num_open_requests=200, num_held_tokens=5000)
    idler = replace(busy, worker_id=NAMES[1], num_open_requests=200 - num_less)
    assert ask(routing_of(name), question(), [busy, idler]).choice == "w1"


@pytest.mark.parametrize("name", [name for name in ROUTING_NAMES if name not in BLIND_TO_LOAD])
def test_at_equal_load_a_warm_worker_is_never_refused_for_its_warmth(name: str) -> None:
    cold = WorkerView(worker_id=NAMES[1], num_capacity_tokens=10_000)
    warm = replace(cold, worker_id=NAMES[0], num_warm_tokens={Tier.DEVICE: 900})
    assert ask(routing_of(name), question(), [cold, warm]).choice == "w0"


@pytest.mark.parametrize("name", ["least-work", "prefix-thresholds", "dynamo", "keepwarm"])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_warmth_comes_before_id(name: str, tier: Tier) -> None:
    cold = WorkerView(worker_id=NAMES[0])
    warm = WorkerView(worker_id=NAMES[1], num_warm_tokens={tier: 900})
    assert ask(routing_of(name), question(), [cold, warm]).choice == "w1"


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'fastest'.*round-robin.*keepwarm"):
        routing_of("fastest")


def test_names_and_policies_are_called_the_same() -> None:
    assert [routing_of(name).name for name in ROUTING_NAMES] == [f"{name}@1" for name in ROUTING_NAMES]
    assert routing_of("consistent-hash", load_factor=1.25).name == "consistent-hash-1.25@1"


def test_round_robins_do_not_share_a_turn() -> None:
    fleet = [WorkerView(worker_id=name) for name in NAMES]
    first, second = routing_of("round-robin"), routing_of("round-robin")
    assert first.choose(question(), fleet).choice == second.choose(question(), fleet).choice == "w0"
