"""Owns the command line's root: mounts the commands and turns errors into messages and exit codes.

Never does the work of a command. Exit codes: 0 fine, 2 usage, 3 configuration, 4 failure at run time.
"""

import sys

from cyclopts import App

from keepwarm import __version__
from keepwarm.core.errors import ConfigurationError, KeepwarmError


def build_app() -> App:
    from keepwarm.cli import bench, doctor, models, replay, serve, worker
    from keepwarm.cli.demo import command as demo
    from keepwarm.cli.kv import command as kv

    app = App(
        name="keepwarm",
        version=__version__,
        help="Serve language models to agents: prefill a context once, keep it warm until the task is done.",
    )
    app.command(serve.serve)
    app.command(demo.demo)
    app.command(models.build_app())
    app.command(kv.build_app())
    app.command(replay.replay)
    app.command(bench.build_app())
    app.command(doctor.build_app())
    app.command(worker.worker, show=False)
    return app


def main() -> None:
    try:
        build_app()()
    except KeepwarmError as error:
        print(f"keepwarm: {error.message}", file=sys.stderr)
        sys.exit(3 if isinstance(error, ConfigurationError) else 4)
    except KeyboardInterrupt:
        sys.exit(130)
