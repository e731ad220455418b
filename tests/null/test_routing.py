"""Routing decisions and the facts they rest on."""

from dataclasses import dataclass

import pytest

from keepwarm.core.blocks import Namespace, Tier, extend_chain
from keepwarm.core.errors import ModelNotFound, Overloaded
from keepwarm.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from keepwarm.core.ids import RequestId, SessionId, WorkerId, WorkflowId
from keepwarm.core.request import Request, SamplingParams, SessionRef
from keepwarm.engine.executor import ModelInfo
from keepwarm.routing.policy import LeastWork, RoundRobin, RoutingPolicy
from keepwarm.routing.router import Router
from keepwarm.workers.worker import WorkerHealth

INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=9, max_model_len=99, block_size=4, kv_bytes_per_token=1
)
ROOT = Namespace(model="m", block_size=4).root()


@dataclass
class Stand:
    worker_id: WorkerId
    info: ModelInfo = INFO
    health: WorkerHealth = WorkerHealth.READY


def request(name: str, num_tokens: int = 40, model: str = "m") -> Request:
    tokens = tuple(range(num_tokens))
    return Request(
        request_id=RequestId(name),
        model=model,
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=1),
        session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
        prompt_keys=tuple(extend_chain(ROOT, ROOT, tokens, 4)),
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
    routes.on_prefilled(WorkerId("a"), RequestId("1"))
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
