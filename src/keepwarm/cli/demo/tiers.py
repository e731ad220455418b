"""Owns the story of `keepwarm demo --tiers`: agents work while their server is killed, and later moved.

Never measures a call (`demo.tier_agents` does), never starts a process itself (`demo.processes` does) and never
computes a figure. Called by `demo.tier_command`.

| phase | server | where prefixes come from |
|---|---|---|
| 0 | all four tiers, device and host too small for all agents | device, host, disk |
| 1 | killed with kill -9 while it streams, started again with the same folder | disk |
| 2 | stopped, its disk folder removed: a new machine | remote |

Then a fresh server with one big device pool does the same calls without interruption: the reference.
"""

import asyncio
import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live

from keepwarm.cli.demo.dialogues import Dialogue
from keepwarm.cli.demo.processes import Remote, ServerProcess, remote_store, served
from keepwarm.cli.demo.tier_agents import Agents, Answer, Task
from keepwarm.cli.demo.tier_figures import PHASES, Story, first_answers
from keepwarm.cli.demo.tier_tables import phase_table, reference_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    device_tokens: int
    host_bytes: int
    reference_tokens: int
    """Enough for everything that the reference server is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that was measured."""

    story: Story
    reference: list[Answer]
    cold: dict[int, list[Answer]]
    """By phase: its first calls, as a server without anything warm answers them."""
    remote: Remote


class Teller:
    """Tells the story once, on `console`. `bodies` by agent and turn."""

    def __init__(
        self,
        console: Console,
        dialogues: Sequence[Dialogue],
        bodies: Sequence[Sequence[dict[str, Any]]],
        sizes: Sizes,
        folder: Path,
    ) -> None:
        self._console = console
        self._bodies = bodies
        self._sizes = sizes
        self._folder = folder
        self._pauses = [[turn.pause_s for turn in dialogue.turns] for dialogue in dialogues]
        self._sessions = [dialogue.dialogue_id for dialogue in dialogues]
        # The last third of each dialogue is for the new machine.
        self._cuts = [len(turns) - max(1, len(turns) // 3) for turns in bodies]

    async def tell(self) -> Told:
        async with remote_store(self._folder) as remote:
            self._console.print(f"The remote tier is {remote.text}.")
            story = await self._story(remote)
        reference, cold = await self._reference(story)
        return Told(story=story, reference=reference, cold=cold, remote=remote)

    # ------------------------------------------------------------------ the three servers

    async def _story(self, remote: Remote) -> Story:
        disk = self._folder / "disk"
        flags = (
            *("--kv-device-tokens", str(self._sizes.device_tokens)),
            *("--max-model-len", str(self._sizes.device_tokens)),
            *("--kv-host-bytes", str(self._sizes.host_bytes)),
            *("--kv-remote", remote.url),
        )
        with_disk = ("--kv-disk", str(disk))
        async with served(self._folder / "server.log", flags) as server:
            await self._start(server, "with device, host, disk and remote tiers", *with_disk)
            agents = Agents(origin_s=time.monotonic())
            kill_now = asyncio.Event()
            # In the middle of all calls, some of those before the new machine still to come. Counted in streams
            # that have begun, so that one has just begun: answers that end together would leave none to cut.
            num_streams_until_kill = 1 + min(sum(map(len, self._bodies)) // 2, sum(self._cuts) - 1)
            num_streams = itertools.count(1)
            agents.on_first_token = lambda: (
                kill_now.set() if next(num_streams) == num_streams_until_kill else None
            )
            async with asyncio.TaskGroup() as group:
                working = group.create_task(agents.work(server.base_url, self._sessions, self._tasks(0)))
                with self._live(agents.answers, 0):
                    await kill_now.wait()
                    num_prefilled = [await server.num_prefilled_tokens()]
                    agents.phase = 1
                    killed_s = agents.now_s()
                    await server.kill()
                self._console.print(
                    "[bold red]kill -9[/] to the server and its worker, while answers stream."
                )
                await self._start(server, "with the same folder", *with_disk)
                ready_again_s = agents.now_s()
                with self._live(agents.answers, 1):
                    await working
            num_prefilled.append(await server.num_prefilled_tokens())
            agents.phase = 2
            stopped_s = agents.now_s()
            await server.stop()
            await asyncio.to_thread(shutil.rmtree, disk)
            self._console.print("The server is stopped and [bold]its disk folder removed[/]: a new machine.")
            await self._start(server, "with memory and the remote tier only")
            ready_elsewhere_s = agents.now_s()
            with self._live(agents.answers, 2):
                await agents.work(server.base_url, self._sessions, self._tasks(1))
            num_prefilled.append(await server.num_prefilled_tokens())
            await server.stop()
        return Story(
            answers=tuple(agents.answers),
            num_prefilled=num_prefilled,
            killed_s=killed_s,
            ready_again_s=ready_again_s,
            stopped_s=stopped_s,
            ready_elsewhere_s=ready_elsewhere_s,
        )

    def _tasks(self, part: int) -> list[list[Task]]:
        """What each agent does before (0) or on (1) the new machine."""
        whole = self._all_tasks()
        if part:
            return [tasks[cut:] for tasks, cut in zip(whole, self._cuts, strict=True)]
        # Nobody thinks while the machine is changed: the pause is long enough.
        return [
            [*tasks[: cut - 1], replace(tasks[cut - 1], pause_s=0.0)]
            for tasks, cut in zip(whole, self._cuts, strict=True)
        ]

    def _all_tasks(self) -> list[list[Task]]:
        return [
            [
                Task(turn=turn, body=body, pause_s=pause_s)
                for turn, (body, pause_s) in enumerate(zip(bodies, pauses, strict=True))
            ]
            for bodies, pauses in zip(self._bodies, self._pauses, strict=True)
        ]

    # ------------------------------------------------------------------ the reference

    async def _reference(self, story: Story) -> tuple[list[Answer], dict[int, list[Answer]]]:
        """The same calls on a server that keeps everything on the device, and the returning calls cold."""
        flags = ("--kv-device-tokens", str(self._sizes.reference_tokens), "--kv-host-bytes", "0")
        async with served(self._folder / "reference.log", flags) as server:
            await self._start(server, "with one big device pool, for the reference")
            agents = Agents(origin_s=time.monotonic())
            tasks = [[replace(task, pause_s=0.0) for task in mine] for mine in self._all_tasks()]
            with Live(
                console=self._console,
                refresh_per_second=4,
                get_renderable=lambda: reference_table(agents.answers, story.answers),
            ):
                await agents.work(server.base_url, self._sessions, tasks)
            self._console.print("\nThe first calls after each restart once more, with nothing warm ...")
            cold = {phase: await self._cold(server, first_answers(story.answers, phase)) for phase in (1, 2)}
            await server.stop()
        return agents.answers, cold

    async def _cold(self, server: ServerProcess, warm: Sequence[Answer]) -> list[Answer]:
        """The calls of `warm` at the same distances in time, under a salt that nothing has been computed for."""
        agents = Agents(origin_s=time.monotonic())
        salt = f"cold-{warm[0].phase}"
        first_s = min(answer.record.started_s for answer in warm)
        async with (
            httpx2.AsyncClient(base_url=server.base_url, timeout=600, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):

            async def ask(answer: Answer) -> Answer:
                agent, turn = answer.place
                await asyncio.sleep(answer.record.started_s - first_s)
                body = {**self._bodies[agent][turn], "cache_salt": salt}
                task = Task(turn=turn, body=body, pause_s=0.0)
                return await agents.ask(client, agent, f"{salt}-{agent}", task)

            asking = [group.create_task(ask(answer)) for answer in warm]
        return [task.result() for task in asking]

    # ------------------------------------------------------------------ what is seen meanwhile

    async def _start(self, server: ServerProcess, how: str, *flags: str) -> None:
        started_s = time.monotonic()
        self._console.print(f"Starting the server {how} ...", end=" ")
        await server.start(*flags)
        self._console.print(f"ready after {time.monotonic() - started_s:.1f} s.")

    @contextmanager
    def _live(self, answers: Sequence[Answer], phase: int) -> Iterator[None]:
        with Live(
            console=self._console,
            refresh_per_second=4,
            get_renderable=lambda: phase_table(PHASES[phase], [a for a in answers if a.phase == phase]),
        ):
            yield
        self._console.print()
