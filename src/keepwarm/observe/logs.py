"""Owns how log lines look, the one access line per request, and what a crash leaves behind.

Never logs prompt or answer text, never a key. `configure_logging` is called once, by the command line.
"""

import enum
import logging
import sys
import traceback
from typing import TextIO

import structlog


class LogFormat(enum.StrEnum):
    JSON = "json"
    CONSOLE = "console"


QUIET_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/metrics"})
"""Paths that monitors ask every few seconds: their access lines are debug lines."""


def default_format() -> LogFormat:
    """For people on a terminal, else for machines."""
    return LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON


def configure_logging(
    level: str = "info", log_format: LogFormat = LogFormat.JSON, stream: TextIO | None = None
) -> None:
    """Send structlog's and the standard library's lines to `stream` (standard error by default) in one form.

    `level` is a standard level name in any case; an unknown one raises ValueError.
    """
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        raise ValueError(f"Unknown log level {level!r}. Use one of: debug, info, warning, error, critical.")
    out = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor]
    if log_format is LogFormat.JSON:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # The default formatter prints local variables, and prompts with them.
        plain = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(names[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(names[level.upper()])


def log_access(
    log: structlog.typing.FilteringBoundLogger,
    *,
    path: str,
    status: int,
    **fields: str | int | float | bool | None,
) -> None:
    """Write the access line of one request. Fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    write = log.debug if path in QUIET_PATHS and status < 500 else log.info
    write("request", path=path, status=status, **known)


def log_crash(log: structlog.typing.FilteringBoundLogger, *, request_id: str, error: Exception) -> None:
    """Write an exception that nobody expected, with its traceback as text.

    Not as `exc_info`: a renderer that shows local variables would write prompts to the log.
    """
    log.error("request_crashed", request_id=request_id, exception="".join(traceback.format_exception(error)))
