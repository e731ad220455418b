"""Owns the body fields beyond either dialect: `nvext`, `keepwarm`, `cache_salt`, and the tenant headers.

Never identifies a session (see `identity`). Called by both dialects' `translate`.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from keepwarm.core.ids import DEFAULT_TENANT, TenantId
from keepwarm.core.request import Hints, RetentionWish, Reuse
from keepwarm.gateway.answer import Extras
from keepwarm.gateway.identity import usable_id
from keepwarm.gateway.retention import MAX_TTL_S, CacheControl, CacheMark, longest, mark_ttl_s, ttl_s
from keepwarm.gateway.sampling import check_float, check_int

_CACHED_BY_TIER = "cached_by_tier"
_RETENTION = "retention"
_INT32 = 2**31 - 1


class AgentHints(Struct):
    """`nvext.agent_hints`. Unknown hints are ignored."""

    priority: int | None = None
    strict_priority: int | None = None
    osl: int | None = None
    expected_return_s: float | None = None


class Nvext(Struct):
    agent_hints: AgentHints | None = None
    cache_salt: str | None = None
    extra_fields: list[str] | None = None
    cache_control: CacheControl | None = None


class KeepwarmOptions(Struct):
    """The body's `keepwarm` object."""

    reuse: bool | None = None
    cached_by_tier: bool | None = None
    retain: str | int | None = None
    """How long the prompt should stay warm."""
    retention: bool | None = None
    """Whether the answer says what became of the wish."""
    expected_return_s: float | None = None


def hints_of(nvext: Nvext | None, options: KeepwarmOptions | None) -> Hints:
    """Raises InvalidRequest for a hint out of its range."""
    given = (nvext.agent_hints if nvext is not None else None) or AgentHints()
    place = "nvext.agent_hints"
    hinted = check_float(f"{place}.expected_return_s", given.expected_return_s, 0, MAX_TTL_S)
    ours = options.expected_return_s if options is not None else None
    stated = check_float("keepwarm.expected_return_s", ours, 0, MAX_TTL_S)
    return Hints(
        priority=check_int(f"{place}.priority", given.priority, -_INT32 - 1, _INT32) or 0,
        strict_priority=check_int(f"{place}.strict_priority", given.strict_priority, 0, 2 * _INT32 + 1) or 0,
        num_expected_output_tokens=check_int(f"{place}.osl", given.osl, 0, _INT32),
        expected_return_s=hinted if stated is None else stated,
    )


def retention_of(
    marks: Iterable[CacheMark],
    nvext: Nvext | None,
    options: KeepwarmOptions | None,
    dialect_ttl_s: int | None = None,
) -> RetentionWish | None:
    """The wish that all these fields together make. Raises InvalidRequest for a mark or time that cannot be."""
    ttls = [mark_ttl_s(mark) for mark in marks]
    if nvext is not None and nvext.cache_control is not None:
        ttls.append(mark_ttl_s(CacheMark("nvext.cache_control", nvext.cache_control)))
    if options is not None and options.retain is not None:
        ttls.append(ttl_s("keepwarm.retain", options.retain))
    return longest([*ttls, dialect_ttl_s])


def tenant_of(headers: Mapping[str, str]) -> TenantId:
    tenant = usable_id(headers.get("x-tenant-id"))
    return DEFAULT_TENANT if tenant is None else TenantId(tenant)


def salt_of(headers: Mapping[str, str], nvext: Nvext | None, cache_salt: str | None) -> str:
    """The cache namespace that the request asks for.

    A tenant header and a salt in the body are combined: a request never shares more than either asks for.
    """
    tenant = usable_id(headers.get("x-tenant-id")) or ""
    salt = (nvext.cache_salt if nvext is not None else None) or cache_salt or ""
    # Both parts always have their place, so that no body can name what a header stands for.
    return f"{len(tenant)}:{tenant}:{salt}" if tenant or salt else ""


def reuse_of(options: KeepwarmOptions | None) -> Reuse:
    return Reuse.OFF if options is not None and options.reuse is False else Reuse.ON


def extras_of(headers: Mapping[str, str], nvext: Nvext | None, options: KeepwarmOptions | None) -> Extras:
    """Which response fields were asked for, in any of the three ways."""
    options = options or KeepwarmOptions()
    named = {part.strip() for part in headers.get("x-keepwarm-extra", "").split(",")}
    named.update((nvext.extra_fields if nvext is not None else None) or ())
    return Extras(
        cached_by_tier=_CACHED_BY_TIER in named or options.cached_by_tier is True,
        retention=_RETENTION in named or options.retention is True,
    )
