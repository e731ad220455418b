"""Owns the settings page of the docs: made from the fields of `compose.settings`, so that it cannot go stale.

Never hand-edited. Run as `python -m keepwarm.cli.settings_page`; a test compares the result with the file.
"""

from pydantic.fields import FieldInfo

from keepwarm.compose.settings import ServeSettings

HEAD = """# Settings of `keepwarm serve`

Each is a flag and an environment variable; the flag wins. This page is made from the code:
`python -m keepwarm.cli.settings_page > docs/settings.md`.

| flag | environment variable | default | meaning |
|---|---|---|---|
"""


def settings_page() -> str:
    rows = [_row(name, field) for name, field in ServeSettings.model_fields.items()]
    return HEAD + "\n".join(rows) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    default = "" if field.default in (None, ()) else f"`{field.default}`"
    return f"| `--{name.replace('_', '-')}` | `KEEPWARM_{name.upper()}` | {default} | {field.description} |"


if __name__ == "__main__":
    print(settings_page(), end="")
