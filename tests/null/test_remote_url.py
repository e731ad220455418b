"""Which tier a remote URL stands for, and what is said about a wrong one. Nothing is connected to."""

from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.store.codecs.raw import RawCodec
from keepwarm.store.tiers.keyed import KeyedTier
from keepwarm.store.tiers.objects import ObjectTier
from keepwarm.store.tiers.peer import PeerTier
from keepwarm.store.tiers.redis import RedisTier
from keepwarm.store.tiers.remote_url import open_remote

RAW = RawCodec()


def open_url(url: str, namespace: str = "smollm2-0f3a") -> KeyedTier:
    return open_remote(url, codec=RAW, codecs={0: RAW}, block_bytes=1024, namespace=namespace, timeout_s=1.0)


@pytest.mark.parametrize(
    ("url", "kind", "name", "is_writable"),
    [
        ("redis://localhost", RedisTier, "redis", True),
        ("redis://user:pass@cache.internal:6380/2", RedisTier, "redis", True),
        ("rediss://:p%40ss@cache.internal", RedisTier, "redis", True),
        ("redis://[::1]:6379", RedisTier, "redis", True),
        ("valkey://localhost/0", RedisTier, "redis", True),
        ("s3://my-bucket", ObjectTier, "s3", True),
        ("s3://my-bucket/some/prefix/", ObjectTier, "s3", True),
        ("file:///var/lib/keepwarm%20blocks", ObjectTier, "file", True),
        ("peer://10.0.0.7:7070", PeerTier, "peer", False),
    ],
)
def test_urls_that_are_known(url: str, kind: type[Any], name: str, is_writable: bool) -> None:
    tier = open_url(url)
    assert isinstance(tier, kind)
    assert (tier.name, tier.is_writable, tier.capacity_bytes, list(tier.entries())) == (
        name,
        is_writable,
        None,
        [],
    )
    tier.close()


@pytest.mark.parametrize(
    "url", ["", "localhost:6379", "http://host/x", "S3", "memcached://host", "://", "gs://bucket/x"]
)
def test_an_unknown_scheme_is_answered_with_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_url(url)
    for known in ("redis://", "rediss://", "valkey://", "s3://", "file://", "peer://"):
        assert known in raised.value.message


@pytest.mark.parametrize(
    "url",
    [
        *(
            "redis://",
            "redis://host:port",
            "redis://host:99999",
            "redis://host/first",
            "redis://host?nonsense=1",
        ),
        *("redis://host?socket_timeout=abc", "valkey:///0"),
        *("s3://", "s3:///prefix", "s3://UPPER/x", "s3://b", "s3://bucket/x?y=1", "s3://key:pass@bucket/x"),
        *("file://", "file:///", "file://relative/path", "file://folder"),
        *(
            "peer://",
            "peer://host",
            "peer://:7070",
            "peer://host:x",
            "peer://host:7070/path",
            "peer://u@host:1",
        ),
    ],
)
def test_a_malformed_url_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret",
        "redis://user:s3cret@host/x",
        "what://user:s3cret@host",
        "s3://key:s3cret@bucket",
    ],
)
def test_messages_quote_no_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_url(url)
    assert "s3cret" not in raised.value.message


@pytest.mark.parametrize("namespace", ["", "a/b", "a b", "../up", "x" * 129, "naïve"])
def test_a_namespace_is_part_of_a_name(namespace: str) -> None:
    with pytest.raises(ConfigurationError):
        open_url("redis://localhost", namespace)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_url(f"file://{tmp_path}/blocks").close()
    assert list(tmp_path.iterdir()) == []
