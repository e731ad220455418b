"""Owns `keepwarm worker`: the inside of a worker process. Started by `keepwarm serve`, not by people.

Never talks HTTP.
"""

import os
import signal

from keepwarm.cli.loop import run_async
from keepwarm.compose.settings import WORKER_SETTINGS, EngineSettingsPart
from keepwarm.compose.worker_process import run_worker
from keepwarm.core.ids import WorkerId
from keepwarm.observe.logs import configure_logging, default_format


def worker(*, endpoint: str, worker_id: str) -> None:
    """Run one worker until its standard input is closed. Its settings are JSON in KEEPWARM_WORKER_SETTINGS.

    Parameters
    ----------
    endpoint
        ZeroMQ address to serve on.
    worker_id
        Name of this worker in events and decisions.
    """
    # Ctrl-C reaches the whole group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = EngineSettingsPart.model_validate_json(os.environ[WORKER_SETTINGS])
    configure_logging(told.log_level, told.log_format or default_format())
    run_async(run_worker(told, endpoint, WorkerId(worker_id)))
