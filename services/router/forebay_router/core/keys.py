"""Checks and changes of keys and tenants, as their contract has them."""

from __future__ import annotations

import re

from forebay.router.v1 import key_service_pb2 as pb
from forebay_common.apikeys import KeySecrets, new_key
from forebay_common.metadata import CLASSES

from forebay_router.core.access import Key, Limits, Scope, Tenant
from forebay_router.core.refusal import RefusedError

MAX_PATTERNS = 256
_NAME = re.compile(r"[a-z0-9._-]{1,64}")
_NOTE_CHARS = 200
_PATTERN_CHARS = 200
_LIFETIME_S_MAX = 100 * 365 * 86400
_WEIGHT_MAX = 1000
_LIMIT_MAX = 10**12


def check_tenant(tenant: pb.Tenant) -> pb.Tenant:
    """Check a tenant's description.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field.
    """
    if not _NAME.fullmatch(tenant.name):
        raise _wrong("name", "must be 1 to 64 of a-z, 0-9, '.', '_' and '-'")
    if len(tenant.models) > MAX_PATTERNS or len(tenant.model_limits) > MAX_PATTERNS:
        field = "models" if len(tenant.models) > MAX_PATTERNS else "model_limits"
        raise _wrong(field, f"holds more than {MAX_PATTERNS} entries")
    for index, pattern in enumerate(tenant.models):
        if not 1 <= len(pattern) <= _PATTERN_CHARS:
            raise _wrong(f"models[{index}]", f"must have 1 to {_PATTERN_CHARS} characters")
    for index, name in enumerate(tenant.priority_classes):
        if name not in CLASSES:
            raise _wrong(f"priority_classes[{index}]", f"must be one of {', '.join(CLASSES)}")
    if tenant.weight > _WEIGHT_MAX:
        raise _wrong("weight", f"must be at most {_WEIGHT_MAX}")
    _check_limits(tenant.limits, "limits")
    for name, limits in tenant.model_limits.items():
        if not 1 <= len(name) <= _PATTERN_CHARS:
            raise _wrong("model_limits", "holds a name that is empty or too long")
        _check_limits(limits, "model_limits")
    return tenant


def _check_limits(limits: pb.TenantLimits, field: str) -> None:
    given = {descriptor.name: value for descriptor, value in limits.ListFields()}
    for name, value in given.items():
        if value > _LIMIT_MAX:
            raise _wrong(f"{field}.{name}", f"must be at most {_LIMIT_MAX}")
    for burst, rate in (("request_burst", "requests_per_min"), ("token_burst", "tokens_per_min")):
        if burst in given and rate not in given:
            raise _wrong(f"{field}.{burst}", f"needs {rate} beside it")
        if given.get(burst) == 0:
            raise _wrong(f"{field}.{burst}", "must be at least 1")


def make_key(
    request: pb.CreateKeyRequest, secrets: KeySecrets, *, now_unix_s: int
) -> tuple[pb.KeyRecord, str]:
    """A new key's record, and its text.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field.
    """
    scopes = sorted(set(request.scopes))
    if not scopes or any(scope not in _SCOPES for scope in scopes):
        raise _wrong("scopes", "must hold inference, read or admin")
    if request.lifetime_s > _LIFETIME_S_MAX:
        raise _wrong("lifetime_s", f"must be at most {_LIFETIME_S_MAX}")
    if len(request.note) > _NOTE_CHARS:
        raise _wrong("note", f"must have at most {_NOTE_CHARS} characters")
    key_id, text = new_key()
    key = pb.ApiKey(
        key_id=key_id,
        tenant=request.tenant,
        scopes=scopes,
        created_unix_s=now_unix_s,
        expires_unix_s=now_unix_s + request.lifetime_s if request.lifetime_s else 0,
        note=request.note,
    )
    secret = secrets.newest
    return pb.KeyRecord(key=key, hash=secret.hash(text), secret_id=secret.secret_id), text


def successor_of(old: pb.ApiKey, *, now_unix_s: int) -> pb.CreateKeyRequest:
    """What to create in a key's place.

    Raises:
        RefusedError: INVALID_ARGUMENT, when the key is good for nothing any more.
    """
    if old.revoked or 0 < old.expires_unix_s <= now_unix_s:
        raise _wrong("key_id", "is revoked or has expired; create a new key")
    lifetime_s = old.expires_unix_s - old.created_unix_s if old.expires_unix_s else 0
    return pb.CreateKeyRequest(
        tenant=old.tenant, scopes=old.scopes, lifetime_s=lifetime_s, note=old.note
    )


def ending(old: pb.ApiKey, *, overlap_s: int, now_unix_s: int) -> pb.ApiKey:
    """A key that goes on for `overlap_s` more, unless it ends before."""
    ends = now_unix_s + max(1, overlap_s)
    changed = pb.ApiKey()
    changed.CopyFrom(old)
    changed.expires_unix_s = min(ends, old.expires_unix_s) if old.expires_unix_s else ends
    return changed


def key_of(record: pb.KeyRecord) -> Key:
    """A stored key."""
    key = record.key
    return Key(
        key.key_id,
        key.tenant,
        frozenset(Scope(scope) for scope in key.scopes if scope in _SCOPES),
        record.hash,
        record.secret_id,
        key.expires_unix_s,
        key.revoked,
    )


def tenant_of(tenant: pb.Tenant) -> Tenant:
    """A stored tenant."""
    return Tenant.of(
        tenant.name,
        tuple(tenant.models),
        priority_classes=frozenset(tenant.priority_classes),
        limits=_limits_of(tenant.limits),
        model_limits={name: _limits_of(limits) for name, limits in tenant.model_limits.items()},
        weight=tenant.weight or 1,
        revision=tenant.revision,
    )


def _limits_of(limits: pb.TenantLimits) -> Limits:
    return Limits(**{field.name: value for field, value in limits.ListFields()})


_SCOPES = frozenset({pb.SCOPE_INFERENCE, pb.SCOPE_READ, pb.SCOPE_ADMIN})


def _wrong(param: str, problem: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{param}' {problem}.", param=param)
