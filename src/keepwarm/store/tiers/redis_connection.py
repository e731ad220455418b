"""Owns RedisConnection: one exchange of commands and answers at a time with a Redis server, under a deadline.

Never knows blocks. Called by `tiers.redis`. redis-py resolves the address, does TLS, logs in and selects the
database; commands are sent in the parts they come in, answers are read by `tiers.redis_answers`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import redis
from redis.connection import parse_url

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.tiers.redis_answers import RedisAnswers


class _Wire(Protocol):
    """What is used of redis-py's Connection."""

    _parser: RedisAnswers

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def send_packed_command(
        self, command: Iterable[bytes | memoryview], check_health: bool = True
    ) -> None: ...


class RedisConnection:
    """One connection, logged in; raises redis.RedisError, OSError or Garbled, and is useless afterwards."""

    def __init__(self, wire: _Wire, timeout_s: float) -> None:
        self._wire = wire
        self._timeout_s = timeout_s
        self.is_doubtful = False
        wire.connect()
        self._answers = wire._parser

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send a batch; its deadline holds for its answers too."""
        self._answers.reader.allow(self._timeout_s)
        self._wire.send_packed_command(self._timed(parts), check_health=False)

    def short_answer(self) -> int | bytes | redis.ResponseError | None:
        return self._answers.read_response()

    def value(self, limit_bytes: int) -> memoryview | redis.ResponseError | None:
        return self._answers.read_value(limit_bytes)

    def is_quiet(self) -> bool:
        return self._answers.reader.is_quiet()

    def close(self) -> None:
        self._wire.disconnect()

    def _timed(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            self._answers.reader.arm()
            yield part


def connector(url: str, timeout_s: float) -> tuple[str, Callable[[], RedisConnection]]:
    """What to call the server in messages (without password), and how to connect to it.

    `url` is redis://[[user]:password@]host[:port][/database], or rediss:// for TLS; redis-py's settings may
    follow as a query (`?ssl_ca_certs=...`). Raises ConfigurationError.
    """
    settings = {
        **_settings(url),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "parser_class": RedisAnswers,
        "protocol": 2,
        "driver_info": None,
        "retry": None,
        "retry_on_error": [],
    }
    kind = settings.pop("connection_class", redis.Connection)
    try:
        kind(**settings)  # connects to nothing yet
    except (ValueError, TypeError, redis.RedisError) as error:
        raise _wrong(str(error)) from error
    scheme = url.partition(":")[0]
    place = f"{scheme}://{settings['host']}:{settings.get('port', 6379)}/{settings.get('db', 0)}"
    return place, lambda: RedisConnection(cast(_Wire, kind(**settings)), timeout_s)


def _settings(url: str) -> dict[str, Any]:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Not the error's own words: it quotes what may be a password.
        raise _wrong("the port is no number, or the host no address") from None
    database = parts.path.strip("/")
    # parse_url passes over both in silence, and would use another server or database.
    if not parts.hostname or (database and not database.isdigit()):
        raise _wrong("the host is missing, or the database is no number")
    try:
        settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise _wrong(str(error)) from error
    return settings


def _wrong(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the remote's address is no redis URL: {reason}. "
        "Write redis://[[user]:password@]host[:port][/database], or rediss:// for TLS"
    )
