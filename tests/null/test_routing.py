"""Routing decisions and the facts they rest on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.decision import Decision
from keepwarm.core.errors import ModelNotFound, Overloaded
from keepwarm.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, WorkerId, WorkflowId
from keepwarm.core.request import Request, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.by_name import ROUTING_NAMES, routing_of
from keepwarm.routing.homes import SessionHomes
from keepwarm.routing.policy import LeastWork, RoundRobin, RouteQuestion, RoutingPolicy, WorkerView
from keepwarm.routing.router import Router
from keepwarm.workers.worker import WorkerHealth

INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=9, max_model_len=99, block_size=4, kv_bytes_per_token=1
)
A, B = WorkerId("a"), WorkerId("b")
ROOT = Namespace(model="m", block_size=4).root()


@dataclass
class Stand:
    worker_id: WorkerId
    info: ModelInfo = INFO
    health: WorkerHealth = WorkerHealth.READY


def request(
    name: str, num_tokens: int = 40, model: str = "m", session: str = "s", now_s: float = 0.0
) -> Request:
    tokens = tuple(range(num_tokens))
    return Request(
        request_id=RequestId(name),
        model=model,
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=1),
        session=SessionRef(session_id=SessionId(session), workflow_id=WorkflowId("w")),
        prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
        arrival_s=now_s,
    )


def router(policy: RoutingPolicy, *names: str) -> tuple[Router, list[Stand]]:
    stands = [Stand(WorkerId(name)) for name in names]
    return Router(workers=stands, policy=policy), stands


@pytest.mark.parametrize("policy", [LeastWork(), RoundRobin()])
def test_every_policy_spreads_equal_work(policy: RoutingPolicy) -> None:
    routes, _ = router(policy, "a", "b")
    assert [routes.route(request(str(n))).choice for n in range(4)] == ["a", "b", "a", "b"]


def test_warm_blocks_attract_and_colder_tiers_attract_less() -> None:
    routes, _ = router(LeastWork(), "a", "b", "c")
    keys = request("x").prompt_keys
    routes.on_block_event(WorkerId("b"), BlocksStored(keys, None, Tier.HOST))
    routes.on_block_event(WorkerId("c"), BlocksStored(keys, None, Tier.DEVICE))
    decision = routes.route(request("1"))
    assert decision.choice == "c"
    assert decision.numbers["num_warm_tokens"] == 40
    assert [candidate.choice for candidate in decision.runners_up] == ["b", "a"]
    routes.on_block_event(WorkerId("c"), AllBlocksCleared())
    routes.on_ended(WorkerId("c"), RequestId("1"))
    assert routes.route(request("2")).choice == "b"
    routes.on_ended(WorkerId("b"), RequestId("2"))
    routes.on_block_event(WorkerId("b"), BlocksRemoved(keys[1:], Tier.HOST))
    assert routes.route(request("3")).numbers["num_warm_tokens"] == 4


def test_load_counts_cold_tokens_until_the_first_token() -> None:
    routes, _ = router(LeastWork(), "a", "b")
    assert routes.route(request("1", 400)).choice == "a"
    assert routes.route(request("2", 40)).choice == "b"
    assert routes.route(request("3", 40)).choice == "b"
    routes.on_tokens(A, RequestId("1"), 1, 0.0)
    assert routes.route(request("4", 40)).choice == "a"


def test_no_worker_is_told_apart_from_no_ready_worker() -> None:
    routes, stands = router(LeastWork(), "a", "b")
    with pytest.raises(ModelNotFound, match="'other'"):
        routes.route(request("1", model="other"))
    stands[0].health = WorkerHealth.LOST
    assert routes.route(request("2")).choice == "b"
    stands[1].health = WorkerHealth.DRAINING
    with pytest.raises(Overloaded, match="a is lost, b is draining"):
        routes.route(request("3"))


@dataclass
class Watcher:
    """Writes down what it is asked, and sends everything to the worker called `choice`."""

    choice: WorkerId = A
    name: str = "watcher@1"
    questions: list[RouteQuestion] = field(default_factory=list)
    views: list[dict[WorkerId, WorkerView]] = field(default_factory=list)

    def choose(self, question: RouteQuestion, workers: Sequence[WorkerView]) -> Decision[WorkerId]:
        self.questions.append(question)
        self.views.append({worker.worker_id: worker for worker in workers})
        return Decision(policy=self.name, kind="route", subject="", choice=self.choice, reason="")


def watched(**parts: Any) -> tuple[Watcher, Router, list[Stand]]:
    watcher, stands = Watcher(), [Stand(A), Stand(B)]
    return watcher, Router(workers=stands, policy=watcher, **parts), stands


def test_a_policy_is_told_the_home_while_it_is_ready() -> None:
    watcher, routes, stands = watched()
    routes.route(request("1", now_s=5.0))
    assert watcher.questions[-1] == RouteQuestion(
        request_id=RequestId("1"), num_prompt_tokens=40, session=(DEFAULT_TENANT, SessionId("s")), now_s=5.0
    )
    watcher.choice = B
    routes.route(request("2"))
    routes.route(request("3"))
    routes.route(request("4", session="other"))
    assert [question.home for question in watcher.questions] == [None, A, B, None]
    stands[1].health, watcher.choice = WorkerHealth.DRAINING, A
    routes.route(request("5", session="other"))
    assert watcher.questions[-1].home is None


def test_homes_are_forgotten_when_closed_idle_or_too_many() -> None:
    watcher, routes, _ = watched(homes=SessionHomes(max_sessions=2, idle_s=10.0))
    homes = [
        (routes.route(request(name, session=name[0], now_s=now_s)), watcher.questions[-1].home)[1]
        for name, now_s in (("a1", 0), ("b1", 1), ("a2", 2), ("c1", 3), ("b2", 4), ("c2", 13), ("b3", 14.5))
    ]
    # b gave way to c, then a to b; the second time, b had been idle for too long.
    assert homes == [None, None, A, None, None, A, None]
    routes.on_session_closed((DEFAULT_TENANT, SessionId("c")))
    routes.on_session_closed((DEFAULT_TENANT, SessionId("never seen")))
    routes.route(request("c3", session="c", now_s=14.6))
    assert watcher.questions[-1].home is None


def test_a_view_has_what_is_open_and_held_and_at_home() -> None:
    watcher, routes, _ = watched(capacity_tokens={A: 500})
    keys = request("x").prompt_keys
    routes.on_block_event(A, BlocksStored(keys[:7], None, Tier.DEVICE))
    routes.on_block_event(A, BlocksStored(keys[4:8], keys[3], Tier.HOST))
    routes.on_block_event(A, BlocksRemoved(keys[6:7], Tier.DEVICE))
    routes.route(request("1"))
    assert watcher.views[-1][A] == WorkerView(
        worker_id=A,
        num_warm_tokens={Tier.DEVICE: 24, Tier.HOST: 8},
        num_used_tokens=24,
        num_capacity_tokens=500,
    )
    routes.route(request("2", session="other"))
    routes.on_capacity(B, 600)
    routes.on_tokens(A, RequestId("2"), 3, 1.0)
    routes.on_block_event(A, AllBlocksCleared())
    routes.route(request("3"))
    assert watcher.views[-1] == {
        A: WorkerView(
            worker_id=A,
            num_open_requests=2,
            num_open_prompt_tokens=8,
            sum_open_prompt_positions=sum(range(32, 40)),
            num_running=1,
            num_held_tokens=83,
            num_home_tokens=80,
            num_capacity_tokens=500,
        ),
        B: WorkerView(worker_id=B, num_capacity_tokens=600),
    }
    for name in "123":
        routes.on_ended(A, RequestId(name))
    routes.route(request("4"))
    # The session that called three times lives here once.
    assert watcher.views[-1][A] == WorkerView(worker_id=A, num_home_tokens=80, num_capacity_tokens=500)


def test_step_time_follows_the_gaps_between_tokens_of_a_request() -> None:
    watcher, routes, _ = watched()
    routes.route(request("1"))
    routes.route(request("2"))
    for name, now_s in (("1", 9.0), ("2", 9.5), ("1", 10.0), ("2", 11.5), ("2", 11.5)):
        routes.on_tokens(A, RequestId(name), 1, now_s)
    routes.route(request("3"))
    # A step of 1 s, then one of 2 s; two answers at one instant are no step.
    assert watcher.views[-1][A].step_s == pytest.approx(0.9 * 1 + 0.1 * 2)
    routes.on_tokens(A, RequestId("gone"), 1, 99.0)
    routes.route(request("4"))
    assert watcher.views[-1][A].step_s == pytest.approx(1.1)
    assert watcher.views[-1][A].num_running == 2


def test_a_request_that_was_placed_elsewhere_counts_as_one_that_was_routed() -> None:
    watcher, routes, stands = watched()
    assert routes.place(request("1"), B)
    routes.route(request("2"))
    assert watcher.questions[-1].home == B
    assert watcher.views[-1][B].num_open_prompt_tokens == watcher.views[-1][B].num_home_tokens == 40
    stands[1].health = WorkerHealth.LOST
    assert not routes.place(request("3"), B)
    stands[1].health = WorkerHealth.READY
    routes.route(request("4"))
    assert watcher.questions[-1].home == A
    assert watcher.views[-1][B].num_open_requests == 1


@pytest.mark.parametrize("name", ROUTING_NAMES)
def test_every_policy_serves_a_router(name: str) -> None:
    stands = [Stand(WorkerId(worker)) for worker in "abc"]
    routes = Router(workers=stands, policy=routing_of(name), capacity_tokens={A: 400, B: 400})
    chosen = set()
    for n in range(30):
        decision = routes.route(request(str(n), session=f"s{n % 10}", now_s=n))
        routes.on_tokens(decision.choice, RequestId(str(n)), 1, n + 0.5)
        if n % 3:
            routes.on_ended(decision.choice, RequestId(str(n)))
        chosen.add(decision.choice)
    assert chosen == {"a", "b", "c"}
