"""Owns `open_remote`: which remote tier a URL stands for.

Never connects: a remote that is down when the server starts is used once it is up. Called by `compose`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from keepwarm.core.errors import ConfigurationError, MissingExtra
from keepwarm.store.codecs.base import Codec
from keepwarm.store.tiers.keyed import KeyedTier

KNOWN_URLS = (
    "redis://[[user]:password@]host[:port][/database]",
    "rediss://... (TLS)",
    "valkey://...",
    "s3://bucket[/prefix]",
    "file:///absolute/folder",
    "peer://host:port",
)
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,128}")


def open_remote(
    url: str,
    *,
    codec: Codec,
    codecs: Mapping[int, Codec],
    block_bytes: int,
    namespace: str,
    timeout_s: float,
) -> KeyedTier:
    """The tier at `url`. `namespace` keeps models apart: letters, digits, `.`, `_` and `-`, at most 128.

    `codec` packs what is written, `codecs` (by codec id) unpack what is read; a peer is only read.
    Raises ConfigurationError for a URL that is none of KNOWN_URLS, MissingExtra when its client is not installed.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError(
            f"the namespace {namespace!r} of a remote tier has other characters than A-Za-z0-9._-"
        )
    common: dict[str, Any] = {
        "codecs": codecs,
        "block_bytes": block_bytes,
        "namespace": namespace,
        "timeout_s": timeout_s,
    }
    scheme = url.partition("://")[0] if "://" in url else ""
    openers: dict[str, Callable[[], KeyedTier]] = {
        "redis": lambda: _redis(url, codec, common),
        "rediss": lambda: _redis(url, codec, common),
        "valkey": lambda: _redis("redis" + url.removeprefix("valkey"), codec, common),
        "valkeys": lambda: _redis("rediss" + url.removeprefix("valkeys"), codec, common),
        "s3": lambda: _s3(url, codec, common),
        "file": lambda: _folder(url, codec, common),
        "peer": lambda: _peer(url, common),
    }
    if scheme not in openers:
        # Without the rest of it, which may hold a password.
        raise _malformed(f"{scheme}://..." if scheme else "(no scheme)", "its scheme is unknown")
    return openers[scheme]()


def _redis(url: str, codec: Codec, common: dict[str, Any]) -> KeyedTier:
    try:
        from keepwarm.store.tiers.redis import RedisTier
    except ImportError as error:
        raise MissingExtra("a redis:// remote tier", "remote") from error
    return RedisTier(url, codec=codec, **common)


def _s3(url: str, codec: Codec, common: dict[str, Any]) -> KeyedTier:
    try:
        from keepwarm.store.tiers import objects
    except ImportError as error:
        raise MissingExtra("an s3:// remote tier", "remote") from error
    parts = urlsplit(url)
    bucket, prefix = parts.netloc, unquote(parts.path).strip("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket) or parts.query or parts.fragment:
        raise _malformed(url, "a bucket has 3 to 63 of a-z, 0-9, '.' and '-', and nothing follows the prefix")
    timeout_s = common["timeout_s"]
    return objects.ObjectTier(
        lambda: objects.open_s3(bucket, prefix, timeout_s), name="s3", place=url, codec=codec, **common
    )


def _folder(url: str, codec: Codec, common: dict[str, Any]) -> KeyedTier:
    try:
        from keepwarm.store.tiers import objects
    except ImportError as error:
        raise MissingExtra("a file:// remote tier", "remote") from error
    parts = urlsplit(url)
    folder = Path(unquote(parts.path))
    if parts.netloc or parts.query or parts.fragment or not folder.is_absolute() or folder == Path("/"):
        raise _malformed(url, "a folder is named by its absolute path, after three slashes")
    return objects.ObjectTier(
        lambda: objects.open_folder(folder), name="file", place=url, codec=codec, **common
    )


def _peer(url: str, common: dict[str, Any]) -> KeyedTier:
    from keepwarm.store.tiers.peer import PeerTier

    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise _malformed(url, str(error)) from error
    if not parts.hostname or not port or parts.path.strip("/") or parts.query or parts.username:
        raise _malformed(url, "a peer is named by host and port alone")
    return PeerTier(parts.hostname, port, **common)


def _malformed(url: str, reason: str) -> ConfigurationError:
    shown = re.sub(r"//[^/]*@", "//***@", url)
    return ConfigurationError(
        f"the remote {shown} cannot be used: {reason}. Known are: {', '.join(KNOWN_URLS)}"
    )
