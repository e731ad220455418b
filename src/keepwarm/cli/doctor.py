"""Owns `keepwarm doctor`: prints what `supply.checkup` found.

Never checks anything itself. Mounted by `cli.main`.
"""

import sys
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from keepwarm.supply.checkup import DEFAULT_PORT, CheckState, check_machine

MARKS = {CheckState.OK: "ok", CheckState.MISSING: "missing", CheckState.OPTIONAL: "-"}


def build_app() -> App:
    app = App(name="doctor", help="Show what this machine can run, what is missing and how to get it.")
    app.default(doctor)
    return app


def doctor(
    *,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = DEFAULT_PORT,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show what this machine can run, what is missing and how to get it. Exit status 1 when something is.

    Parameters
    ----------
    port
        The port that `keepwarm serve` is going to use.
    as_json
        Print a JSON array of {"name", "state", "found", "fix"} instead of lines.
    """
    checks = check_machine(port=port)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(checks), indent=2).decode())
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{MARKS[check.state]:<8} {check.name:<{width}}  {check.found}")
            if check.fix:
                print(f"{'':<8} {'':<{width}}  -> {check.fix}")
    missing = [check.name for check in checks if check.state is CheckState.MISSING]
    if not as_json:
        print(f"Missing: {', '.join(missing)}." if missing else "Ready: keepwarm demo, keepwarm serve.")
    if missing:
        sys.exit(1)
