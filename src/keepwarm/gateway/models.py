"""Owns the answers of `/v1/models`: one object that clients of both dialects can read.

Never names a model that is not served. Called by `gateway.app`.
"""

import datetime

from msgspec import Struct, field

from keepwarm.gateway.service import Gateway, ServedModel


class ModelOut(Struct, kw_only=True):
    """A served model, in both dialects at once.

    `object`, `created`, `owned_by` are for OpenAI clients, `type`, `display_name`, `created_at` for
    Anthropic's; the rest says how long a context may be, under every name that clients look for.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "keepwarm"
    root: str
    type: str = "model"
    display_name: str
    created_at: str
    max_model_len: int
    context_window: int
    context_length: int
    max_input_tokens: int
    max_output_tokens: int
    max_tokens: int


class ModelList(Struct, kw_only=True):
    object: str = "list"
    data: list[ModelOut] = field(default_factory=list)
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


def model_out(name: str, served: ServedModel) -> ModelOut:
    length = served.info.max_model_len
    created = datetime.datetime.fromtimestamp(int(served.created_s), datetime.UTC)
    return ModelOut(
        id=name,
        created=int(served.created_s),
        root=served.name,
        display_name=name,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_model_len=length,
        context_window=length,
        context_length=length,
        max_input_tokens=length,
        max_output_tokens=length,
        max_tokens=length,
    )


def model_list(gateway: Gateway) -> ModelList:
    """All names, sorted; never paged, whatever `limit` the client sends."""
    data = [model_out(name, served) for name, served in sorted(gateway.models.items())]
    return ModelList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None)
