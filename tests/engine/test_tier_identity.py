"""Greedy tokens of the real model are the same whatever tier a conversation's blocks come from.

The reference is each turn alone, cold. Everything else runs through the whole worker, with stores opened as the
server opens them. Between runs device memory is overwritten: nothing may come from what an earlier run left.
"""

import functools
import itertools
import random
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_token_identity import BLOCK_SIZE, NUM_OUTPUT, opened

from keepwarm.compose.parts import EngineLimits, build_engine_loop
from keepwarm.compose.settings import EngineSettingsPart
from keepwarm.compose.tiers import open_slow_tiers
from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.core.events import RequestFinished, TokensGenerated
from keepwarm.core.ids import RequestId, SessionId, WorkflowId
from keepwarm.core.request import Request, Reuse, SamplingParams, SessionRef
from keepwarm.engine.torch.runner import TorchExecutor
from keepwarm.engine.torch.settings import EngineSettings
from keepwarm.store.block import BackgroundTask
from keepwarm.store.record import MAGIC
from keepwarm.store.tiers.local import LocalBlockStore
from keepwarm.workers.engine_loop import EngineLoop

NUM_DEVICE_BLOCKS = 40
NUM_TURNS = 3


@functools.cache
def executor() -> TorchExecutor:
    return opened().build(
        EngineSettings(num_device_blocks=NUM_DEVICE_BLOCKS, block_size=BLOCK_SIZE, num_threads=2)
    )


def root() -> BlockKey:
    return Namespace(model=executor().info.fingerprint, block_size=BLOCK_SIZE).root()


@dataclass
class Run:
    """A worker over the tiers that `settings` name."""

    loop: EngineLoop
    tasks: deque[BackgroundTask] = field(default_factory=deque)
    now_s: float = 0.0
    end: RequestFinished | None = None

    def serve(self, prompt: tuple[int, ...], reuse: Reuse = Reuse.ON) -> list[int]:
        """The tokens that follow `prompt`; all that is to be saved is saved when this returns."""
        self.now_s += 1.0
        request = Request(
            request_id=RequestId(f"r{self.now_s}"),
            model="m",
            token_ids=prompt,
            sampling=SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0),
            session=SessionRef(session_id=SessionId("s"), workflow_id=WorkflowId("w")),
            block_root=root(),
            prompt_keys=tuple(extend_chain(root(), root(), prompt, BLOCK_SIZE)),
            arrival_s=self.now_s,
            reuse=reuse,
        )
        self.loop.submit(request, self.now_s)
        tokens: list[int] = []
        while True:
            self.now_s += 0.001
            plan = self.loop.begin(self.now_s)
            self.tasks += self.loop.take_tasks()
            if plan is not None:
                events = self.loop.end(plan, *self.loop.execute(plan), self.now_s)
            elif self.tasks:
                task = self.tasks.popleft()
                events = self.loop.end_task(task, self.loop.execute_task(task), self.now_s)
            else:
                assert self.loop.is_settled
                return tokens
            for event in events:
                if isinstance(event, TokensGenerated):
                    tokens += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished):
                    self.end = event

    @property
    def cached(self) -> dict[Tier, int]:
        """Of the last prompt."""
        assert self.end is not None
        return self.end.usage.cached_by_tier


@contextmanager
def running(**settings: object) -> Iterator[Run]:
    part = EngineSettingsPart.model_validate({"kv_disk_bytes": 400_000_000, **settings})
    pool = executor().pool
    keyed = open_slow_tiers(part, executor().info, block_bytes=pool.block_bytes, kv_layout=pool.layout)
    pool.kv.fill_(3.0)
    store = LocalBlockStore(device=pool, host_bytes=64 << 20, keyed=keyed)
    loop = build_engine_loop(
        executor=executor(),
        block_store=store,
        limits=EngineLimits(),
        on_decision=lambda now_s, decision: None,
        checks_invariants=True,
    )
    try:
        yield Run(loop)
    finally:
        store.close()


@functools.cache
def turns() -> tuple[tuple[tuple[int, ...], list[int]], ...]:
    """Prompt and answer of each turn, cold; each prompt is the last one, its answer, and something new."""
    draw = random.Random(11)
    prompt = tuple(draw.randrange(300, 40_000) for _ in range(250))
    found = []
    with running() as run:
        for _ in range(NUM_TURNS):
            answer = run.serve(prompt, Reuse.OFF)
            assert run.cached == {}
            found.append((prompt, answer))
            prompt = (*prompt, *answer, *(draw.randrange(300, 40_000) for _ in range(60)))
    return tuple(found)


def num_full(num_tokens: int) -> int:
    """Tokens of whole blocks of a prompt that can be found: its last token must be computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def fill(**settings: object) -> None:
    """Let a worker have the conversation, and end."""
    conversation = turns()  # first: it runs on the same device
    with running(**settings) as run:
        for prompt, answer in conversation:
            assert run.serve(prompt) == answer
        assert run.loop.stats().num_unsaved_blocks == 0


def check_all_from(tier: Tier, **settings: object) -> None:
    """A new worker must find the last prompt on `tier`, whole, and answer it alike."""
    prompt, answer = turns()[-1]
    with running(**settings) as run:
        assert run.serve(prompt) == answer
        assert run.cached == {tier: num_full(len(prompt))}
        assert run.loop.stats().num_bad_blocks == {tier: 0}


@pytest.fixture(scope="module")
def disk_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The raw blocks of the conversation; to be copied by who changes it."""
    folder = tmp_path_factory.mktemp("disk") / "kv"
    fill(kv_disk=folder)
    return folder


def test_from_the_device_and_from_the_host() -> None:
    draw = random.Random(12)
    other = tuple(draw.randrange(300, 40_000) for _ in range((NUM_DEVICE_BLOCKS - 2) * BLOCK_SIZE))
    conversation = turns()
    with running() as run:
        assert run.serve(conversation[0][0]) == conversation[0][1]
        for (before, _), (prompt, answer) in itertools.pairwise(conversation):
            assert run.serve(prompt) == answer
            assert run.cached == {Tier.DEVICE: num_full(len(before) + NUM_OUTPUT)}
        run.serve(other)
        prompt, answer = conversation[-1]
        assert run.serve(prompt) == answer
        assert run.cached[Tier.HOST] >= num_full(len(prompt)) - 2 * BLOCK_SIZE


def test_from_the_disk_after_a_restart(disk_folder: Path) -> None:
    check_all_from(Tier.DISK, kv_disk=disk_folder)
    with running(kv_disk=disk_folder) as run:
        num_cached = 0
        for prompt, answer in turns()[::2]:
            assert run.serve(prompt) == answer
            on_device = {Tier.DEVICE: num_cached} if num_cached else {}
            assert run.cached == {**on_device, Tier.DISK: num_full(len(prompt)) - num_cached}
            num_cached = num_full(len(prompt) + NUM_OUTPUT)


def test_from_packed_blocks_on_the_disk(tmp_path: Path) -> None:
    fill(kv_disk=tmp_path / "kv", kv_codec="zstd")
    # What one codec wrote is read whatever the codec for new blocks is.
    check_all_from(Tier.DISK, kv_disk=tmp_path / "kv", kv_codec="raw")


def test_from_the_remote(tmp_path: Path) -> None:
    fill(kv_remote=tmp_path.as_uri())
    check_all_from(Tier.REMOTE, kv_remote=tmp_path.as_uri())


def test_a_rotten_record_in_the_middle(disk_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(disk_folder, folder)
    prompt, answer = turns()[-1]
    num_sound = len(prompt) // BLOCK_SIZE // 2
    damage(folder, extend_chain(root(), root(), prompt, BLOCK_SIZE)[num_sound])
    with running(kv_disk=folder) as run:
        assert run.serve(prompt) == answer
        assert run.loop.stats().num_bad_blocks == {Tier.DISK: 1}
        assert run.cached == {Tier.DISK: num_sound * BLOCK_SIZE}
        assert run.end is not None
        assert run.loop.stats().num_prefilled_tokens == len(prompt) - num_sound * BLOCK_SIZE
    check_all_from(Tier.DISK, kv_disk=folder)


def damage(folder: Path, key: BlockKey) -> None:
    """Flip one bit in the middle of the block with `key`."""
    for path in folder.glob("segment-*.kws"):
        data = bytearray(path.read_bytes())
        position = data.find(key)  # a record names its key before any other names it as parent
        if position >= 0 and data[position - 20 : position - 16] == MAGIC:
            data[position + executor().pool.block_bytes // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("no segment has the block")
