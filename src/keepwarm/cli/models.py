"""Owns `keepwarm models`: pull, list and rm.

Never touches files itself: `supply.models` does. Mounted by `cli.main`, which also turns a `KeepwarmError`
into a message and an exit code.
"""

import sys
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from keepwarm.cli.progress import pull_progress
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.supply.models import list_models, models_dir, pull_model, remove_model


def build_app() -> App:
    app = App(name="models", help="Fetch, list and remove model weights.")
    app.command(pull)
    app.command(list_, name="list")
    app.command(rm)
    return app


def pull(name: str = DEFAULT_MODEL_NAME, *, verify: bool = False) -> None:
    """Fetch the weights of a known model, unless they are here already.

    Parameters
    ----------
    name
        A name from `keepwarm models list`.
    verify
        Compare the SHA-256 again even when the file was checked before and has not changed since.
    """
    with pull_progress() as on_progress:
        path = pull_model(name, verify=verify, on_progress=on_progress)
    print(path)


def list_(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show the known models and which of them are on this machine.

    Parameters
    ----------
    as_json
        Print a JSON array instead of a table.
    """
    rows = [
        {
            "name": entry.model.name,
            "title": entry.model.title,
            "licence": entry.model.licence,
            "size_bytes": entry.model.member_bytes,
            "source": entry.model.requirement,
            "is_pulled": entry.is_pulled,
            "path": str(entry.path),
        }
        for entry in list_models()
    ]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return
    print(f"{'name':<24} {'size':>8}  {'licence':<12} {'state':<10} title")
    for entry in list_models():
        state = "pulled" if entry.is_pulled else "not pulled"
        model = entry.model
        size = f"{model.member_bytes / 1e6:.0f} MB"
        print(f"{model.name:<24} {size:>8}  {model.licence:<12} {state:<10} {model.title}")
    print(f"folder: {models_dir()}")


def rm(name: str) -> None:
    """Delete the weights of a model from this machine.

    Parameters
    ----------
    name
        A name from `keepwarm models list`.
    """
    num_bytes = remove_model(name)
    print(f"{name}: {num_bytes / 1e6:.0f} MB freed" if num_bytes else f"{name}: was not on this machine")
