"""What admission knows of a worker: what fits it, and what the calls that were sent there hold."""

from dataclasses import dataclass

from keepwarm.compose.live import capacity_of
from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.core.blocks import Tier
from keepwarm.core.ids import RequestId, WorkerId
from keepwarm.engine.executor import ModelInfo
from keepwarm.store.tiers.counted import CountedBlockStore
from keepwarm.testing import ManualClock, ScriptedExecutor, linear_step_time
from keepwarm.workers.local import LocalWorker
from keepwarm.workers.runners import ClockedStepRunner
from keepwarm.workers.worker import WorkerHealth
from keepwarm.workflow.admission.policy import WorkerRoom
from keepwarm.workflow.rooms import UNKNOWN_CAPACITY, Rooms, WorkerCapacity

INFO = ModelInfo(
    name="m", fingerprint="m", vocab_size=300, max_model_len=512, block_size=4, kv_bytes_per_token=250
)
W0, W1 = WorkerId("w0"), WorkerId("w1")


@dataclass
class Sized:
    worker_id: WorkerId
    info: ModelInfo = INFO
    health: WorkerHealth = WorkerHealth.READY


def test_a_room_is_what_fits_less_what_is_held() -> None:
    capacity = WorkerCapacity(num_tokens=100, num_lower_tokens=60, num_slots=3)
    rooms = Rooms([Sized(W0), Sized(W1, health=WorkerHealth.LOST)], {W0: capacity})
    rooms.set_tokens(W0, RequestId("a"), 30)
    rooms.set_tokens(W0, RequestId("b"), 90)
    rooms.set_tokens(W0, RequestId("a"), 40)
    rooms.set_tokens(W0, RequestId("b"), 0)
    assert rooms.rooms() == [
        WorkerRoom(
            worker_id=W0,
            num_capacity_tokens=100,
            num_free_tokens=60,
            num_free_slots=2,
            num_open_requests=1,
            num_lower_tokens=60,
        )
    ]


def test_a_worker_of_unknown_size_has_no_lower_tiers() -> None:
    (room,) = Rooms([Sized(W1)]).rooms()
    assert (room.num_capacity_tokens, room.num_lower_tokens) == (UNKNOWN_CAPACITY, 0)


async def test_a_server_counts_its_workers_host_tier() -> None:
    slots = {Tier.DEVICE: 50, Tier.HOST: 30}
    clock = ManualClock()
    worker = LocalWorker(
        worker_id=W0,
        info=INFO,
        engine=build_engine_loop(
            executor=ScriptedExecutor(INFO, step_time=linear_step_time(0.01, 0.001)),
            block_store=CountedBlockStore(block_bytes=1000, num_slots=slots, bytes_per_s=5e6),
            limits=EngineLimits(),
            on_decision=lambda now_s, decision: None,
        ),
        clock=clock,
        runner=ClockedStepRunner(clock),
    )
    found = await capacity_of(worker, num_slots=7)
    assert found == WorkerCapacity(num_tokens=200, num_lower_tokens=120, num_slots=7)
