"""Owns ObjectTier: blocks in an object store (S3 and what speaks like it) or a shared folder, one object each.

Never lists and never deletes but for `drop`: what is old goes by the bucket's lifecycle rules. Called through
`tiers.keyed`; built by `tiers.remote_url`. Requests run at once, a bounded number of them, on the event loop
of a private thread; the callers wait.

An S3 store takes its settings from the environment variables that S3 tools share: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION (or AWS_DEFAULT_REGION), AWS_ENDPOINT_URL for a server other
than Amazon's, AWS_SKIP_SIGNATURE for one without log-in, AWS_VIRTUAL_HOSTED_STYLE_REQUEST for one that has a
host name per bucket.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from keepwarm.core.blocks import BlockKey
from keepwarm.core.errors import TierFull, TierUnavailable
from keepwarm.store.codecs.base import Codec
from keepwarm.store.record import BlockLabel, BlockRead, pack_record, unpack_record
from keepwarm.store.tiers.batches import leading_run, record_limit
from keepwarm.store.tiers.keyed import StoredEntry

_IN_FLIGHT = 16
"""Requests at once: hides a store's latency; memory stays at 16 records."""
_NUM_RETRIES = 2
"""Inside one time-out. Object stores answer `slow down` now and then."""
_NO_ROOM = (
    "No space left", "StorageFull", "QuotaExceeded", "Disk quota", "Read-only file system", "Insufficient Storage",
)  # fmt: skip
"""How stores say that nothing can be added; there is no error class for it."""

_T = TypeVar("_T")


class ObjectTier:
    is_writable = True
    capacity_bytes: int | None = None

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        *,
        name: str,
        place: str,
        codec: Codec,
        codecs: Mapping[int, Codec],
        block_bytes: int,
        namespace: str,
        timeout_s: float,
    ) -> None:
        """`open_store` is called on first use, and again when it failed. `place` names the store in messages."""
        self.name = name
        self._open_store = open_store
        self._place = place
        self._codec = codec
        self._codecs = codecs
        self._block_bytes = block_bytes
        self._folder = f"v1/{namespace}/"
        self._timeout_s = timeout_s
        self._store: ObjectStore | None = None
        self._requests = RequestThread(timeout_s)

    def entries(self) -> Iterable[StoredEntry]:
        return ()

    def num_leading(self, keys: Sequence[BlockKey]) -> int:
        return leading_run(
            len(keys), _IN_FLIGHT, lambda indexes: self._run(self._exists, [keys[i] for i in indexes])
        )

    def read(self, keys: Sequence[BlockKey], outs: Sequence[memoryview]) -> list[BlockRead]:
        return self._run(self._get, list(zip(keys, outs, strict=True)))

    def write(self, labels: Sequence[BlockLabel], blocks: Sequence[memoryview]) -> list[int]:
        return self._run(self._put, list(zip(labels, blocks, strict=True)))

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._run(self._delete, keys)

    def close(self) -> None:
        self._requests.close()

    async def _exists(self, store: ObjectStore, key: BlockKey) -> bool:
        try:
            await obstore.head_async(store, self._path(key))
        except FileNotFoundError:
            return False
        return True

    async def _get(self, store: ObjectStore, wanted: tuple[BlockKey, memoryview]) -> BlockRead:
        key, out = wanted
        try:
            found = await obstore.get_async(store, self._path(key))
            if found.meta["size"] > record_limit(self._block_bytes):
                return BlockRead.ROTTEN
            record = memoryview(await found.bytes_async())
        except FileNotFoundError:
            return BlockRead.MISSING
        return unpack_record(key, record, out, self._codecs)

    async def _put(self, store: ObjectStore, item: tuple[BlockLabel, memoryview]) -> int:
        label, block = item
        # Joined into memory of its own: after a time-out a request may outlive the block that it carries.
        record = b"".join(pack_record(label, block, self._codec))
        try:
            await obstore.put_async(store, self._path(label.key), record, use_multipart=False)
        except (PermissionError, PermissionDeniedError) as error:
            raise self._full(error) from error
        except (BaseError, OSError, ValueError) as error:
            if any(sign in str(error) for sign in _NO_ROOM):
                raise self._full(error) from error
            raise
        return len(record)

    async def _delete(self, store: ObjectStore, key: BlockKey) -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(store, self._path(key))

    def _path(self, key: BlockKey) -> str:
        return self._folder + key.hex()

    def _run(
        self, request: Callable[[ObjectStore, Any], Coroutine[Any, Any, _T]], items: Sequence[Any]
    ) -> list[_T]:
        try:
            if self._store is None:
                self._store = self._open_store()
            store = self._store
            return self._requests.map(lambda item: request(store, item), items)
        except (BaseError, OSError, ValueError) as error:
            raise TierUnavailable(
                f"{self._place} cannot be used: {_first_line(error)}. It is asked again later; check that it "
                f"exists, that it may be used from here and that it answers within {self._timeout_s:g} s"
            ) from error

    def _full(self, error: Exception) -> TierFull:
        return TierFull(
            f"{self._place} refuses to store blocks: {_first_line(error)}. What it holds is still read; "
            "make room, or allow writing"
        )


class RequestThread:
    """An event loop in a thread of its own, started on first use."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def map(self, request: Callable[[Any], Awaitable[_T]], items: Sequence[Any]) -> list[_T]:
        """Run `request` on all items, each within the time-out. The first failure ends all and is raised."""
        with self._lock:
            # Under the lock, so that `close` finds each call either refused or among the tasks it cancels.
            loop = self._running_loop()
            answers = asyncio.run_coroutine_threadsafe(self._map(request, items), loop)
        try:
            return answers.result()
        except concurrent.futures.CancelledError:
            raise ConnectionError("it was closed") from None

    def close(self) -> None:
        """End the calls that still run with an error, and the thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _map(self, request: Callable[[Any], Awaitable[_T]], items: Sequence[Any]) -> list[_T]:
        places = asyncio.Semaphore(_IN_FLIGHT)

        async def run_one(item: Any) -> _T:
            async with places, asyncio.timeout(self._timeout_s):
                return await request(item)

        tasks = [asyncio.create_task(run_one(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # Nothing writes into the caller's memory after this returns.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise ConnectionError("it is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="keepwarm-objects", daemon=True
            )
            self._thread.start()
        return self._loop


def open_s3(bucket: str, prefix: str, timeout_s: float) -> S3Store:
    limit = timedelta(seconds=timeout_s)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={
            "timeout": limit,
            "connect_timeout": limit,
            # Whoever writes http:// into the endpoint has chosen it.
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={
            "max_retries": _NUM_RETRIES,
            "retry_timeout": limit,
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": limit, "base": 2},
        },
    )


def open_folder(folder: Path) -> LocalStore:
    return LocalStore(folder, mkdir=True)


def open_memory() -> MemoryStore:
    return MemoryStore()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
