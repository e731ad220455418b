"""Owns every setting of a server: name, type, default, bounds and text, each once.

Never builds anything. Flags (`--kv-host-bytes`), environment variables (`KEEPWARM_KV_HOST_BYTES`) and the
settings page of the docs all come from these fields.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from keepwarm.compose.policies import EVICTION_NAMES, PolicyNames
from keepwarm.observe.logs import LogFormat
from keepwarm.routing.by_name import ROUTING_NAMES
from keepwarm.supply.catalogue import DEFAULT_MODEL_NAME
from keepwarm.workflow.admission.by_name import NAMES as ADMISSION_NAMES

SCRIPTED_MODEL = "scripted"
"""A model name that loads no model: an engine with scripted tokens, for trying clients without torch."""


WORKER_SETTINGS = "KEEPWARM_WORKER_SETTINGS"
"""Environment variable in which a worker process finds its settings, as JSON."""


class WorkerPlace(StrEnum):
    PROCESS = "process"
    """In a process of its own: an engine that dies takes no client connection with it."""
    INLINE = "inline"
    """In the server's process, on a thread."""


class EngineSettingsPart(BaseSettings):
    """What a worker needs to know. Sent to the worker process as JSON."""

    model_config = SettingsConfigDict(env_prefix="KEEPWARM_", extra="forbid")

    model: Annotated[
        str, Field(description="Name of a known model, a GGUF file or a safetensors folder.")
    ] = DEFAULT_MODEL_NAME
    served_model_name: Annotated[
        str | None,
        Field(
            description="Name under which clients ask for the model. Default: the name or file it was given by."
        ),
    ] = None
    weights: Annotated[
        Literal["int8", "fp32"], Field(description="Precision of the linear layers on the CPU.")
    ] = "int8"
    block_size: Annotated[
        int,
        Field(
            ge=1, le=1024, description="Tokens in one KV block; the embedded engine takes multiples of 16."
        ),
    ] = 16
    max_model_len: Annotated[
        int | None,
        Field(ge=1, description="Most tokens in one sequence. Default: what the model was made for."),
    ] = None
    max_batch_tokens: Annotated[
        int,
        Field(ge=1, description="Most tokens in one engine step; longer prompts are prefilled in chunks."),
    ] = 512
    max_running: Annotated[
        int, Field(ge=1, description="Most requests that hold device blocks at the same time.")
    ] = 64
    kv_device_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="Device KV pool in tokens. Default: 15 % of the machine's memory, at most 131,072 tokens.",
        ),
    ] = None
    kv_host_bytes: Annotated[
        int | None,
        Field(ge=0, description="Host KV tier in bytes, 0 for none. Default: 25 % of the machine's memory."),
    ] = None
    kv_disk: Annotated[
        Path | None,
        Field(description="Folder of the disk KV tier, which survives restarts. Default: no disk tier."),
    ] = None
    kv_disk_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            description="Most bytes of the disk tier's files. Default: 20 % of the free space, at most 256 GiB.",
        ),
    ] = None
    kv_remote: Annotated[
        str | None,
        Field(
            description="Remote KV tier: redis://[user:password@]host:port/db, s3://bucket/prefix "
            "(credentials and endpoint from AWS_* variables), file:///folder, peer://host:port. Default: none."
        ),
    ] = None
    kv_remote_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds after which an operation on the remote tier has failed.")
    ] = 5.0
    kv_codec: Annotated[
        Literal["raw", "zstd"],
        Field(
            description="How blocks are packed on disk and remote tiers: raw, or zstd (about 15 % smaller, for "
            "tiers slower than 0.5 GB/s)."
        ),
    ] = "raw"
    kv_retention_bytes: Annotated[
        int | None,
        Field(
            ge=0,
            description="Most bytes of KV that one tenant (x-tenant-id) may have under retention wishes "
            "(cache_control, keepwarm.retain). Default: half of device and host.",
        ),
    ] = None
    kv_peer_listen: Annotated[
        str | None,
        Field(
            description="host:port on which other workers may read this one's host tier (peer://). Only for "
            "networks you trust. Default: off."
        ),
    ] = None
    eviction: Annotated[
        str, Field(description=f"Which KV blocks leave a full tier first: {', '.join(EVICTION_NAMES)}.")
    ] = PolicyNames().eviction
    routing: Annotated[
        str,
        Field(
            description=f"Which worker gets a request: {', '.join(ROUTING_NAMES)}. Of use with several workers "
            "only; keepwarm predicts with the costs of an example machine, not with measured ones."
        ),
    ] = PolicyNames().routing
    admission: Annotated[
        str,
        Field(
            description=f"Which calls may go to a worker now, and in which order: {', '.join(ADMISSION_NAMES)}."
        ),
    ] = PolicyNames().admission
    num_threads: Annotated[
        int | None, Field(ge=1, description="Threads of the engine. Default: one for each core.")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Field(description="Least level to log.")
    ] = "info"
    log_format: Annotated[
        LogFormat | None, Field(description="Form of log lines. Default: console on a terminal, else JSON.")
    ] = None

    def policies(self) -> PolicyNames:
        """Raises ConfigurationError for a policy that nobody knows."""
        return PolicyNames(eviction=self.eviction, routing=self.routing, admission=self.admission)


class ServeSettings(EngineSettingsPart):
    """Everything `keepwarm serve` can be told."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(
            description="Keys that open the API; none: it is open. May be repeated; commas part them in the "
            "environment variable."
        ),
    ] = ()
    chat_template: Annotated[
        Path | None, Field(description="Jinja file used instead of the model's own chat template.")
    ] = None
    tool_format: Annotated[
        str | None, Field(description="Parser for tool calls. Default: the one that fits the template.")
    ] = None
    max_body_bytes: Annotated[int, Field(ge=1, description="Largest request body.")] = 32 * 1024 * 1024
    drain_timeout_s: Annotated[
        float, Field(ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    ] = 30.0
    worker: Annotated[WorkerPlace, Field(description="Where the engine runs.")] = WorkerPlace.PROCESS
    decision_log: Annotated[
        Path | None, Field(description="File that receives every decision, one JSON line each.")
    ] = None

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _refuse_empty_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        # An empty key would be matched by a request that sends none.
        if not all(key.strip() for key in keys):
            raise ValueError(
                "a key is empty; give it a value, or leave the setting out to serve without keys"
            )
        return keys

    def engine_part(self) -> EngineSettingsPart:
        """The settings that a worker process needs, without those of the gateway."""
        names = EngineSettingsPart.model_fields.keys()
        return EngineSettingsPart.model_validate({name: getattr(self, name) for name in names})
