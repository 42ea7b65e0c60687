"""Who is let in, and what for."""

from __future__ import annotations

import secrets as random_secrets
from typing import Any

import pytest
from forebay.router.v1 import key_service_pb2 as pb
from forebay_common.apikeys import key_id_of, new_secret, read_secrets
from forebay_common.errors import ForebayError, Reason
from forebay_router.core.access import (
    ALL_SCOPES,
    Identity,
    Keyring,
    Scope,
    Tenant,
    bearer_of,
    scope_of_method,
    scope_of_route,
)
from forebay_router.core.keys import (
    check_tenant,
    ending,
    key_of,
    make_key,
    successor_of,
    tenant_of,
)
from forebay_router.core.refusal import RefusedError
from forebay_router.gate import KeyGate

_OLD, _NEW = new_secret(), new_secret()
_SECRETS = read_secrets(_NEW)
_NOW = 1_000_000


def made(**fields: Any) -> tuple[pb.KeyRecord, str]:
    request = {"tenant": "t", "scopes": [pb.SCOPE_INFERENCE], **fields}
    return make_key(pb.CreateKeyRequest(**request), _SECRETS, now_unix_s=_NOW)


def keyring(*records: pb.KeyRecord) -> Keyring:
    keys = {record.key.key_id: key_of(record) for record in records}
    return Keyring(_SECRETS, keys, {"t": Tenant("t")})


def identified(ring: Keyring, text: str, now: float = _NOW) -> Identity | str:
    try:
        return ring.identify(text, now)
    except RefusedError as refused:
        return f"{refused.reason}: {refused.message}"


def test_a_key_lets_its_tenant_in() -> None:
    record, text = made()
    identity = identified(keyring(record), text)
    assert isinstance(identity, Identity)
    assert (identity.tenant.name, identity.key_id) == ("t", record.key.key_id)
    assert identity.scopes == {Scope.INFERENCE}


def test_every_refusal_reads_the_same_and_repeats_nothing() -> None:
    good, text = made()
    revoked, revoked_text = made()
    revoked.key.revoked = True
    expired, expired_text = made(lifetime_s=10)
    orphan, orphan_text = made(tenant="gone")
    ring = keyring(good, revoked, expired, orphan)
    key_id = good.key.key_id
    refusals = {
        identified(ring, each, _NOW + 10)
        for each in (
            "",
            "nonsense",
            "sk-something",
            made()[1],
            f"fb-{key_id}.{random_secrets.token_urlsafe(32)}",
            text[:-1],
            text + "x",
            text.upper(),
            revoked_text,
            expired_text,
            orphan_text,
        )
    }
    assert refusals == {"UNAUTHENTICATED: The API key is not valid."}
    assert isinstance(identified(ring, expired_text, _NOW + 9), Identity)


def test_admin_holds_the_other_scopes() -> None:
    record, text = made(scopes=[pb.SCOPE_ADMIN])
    identity = identified(keyring(record), text)
    assert isinstance(identity, Identity)
    assert identity.scopes == ALL_SCOPES


@pytest.mark.parametrize("scope", list(ALL_SCOPES))
def test_a_scope_that_is_not_there_is_named(scope: Scope) -> None:
    identity = Identity(Tenant("t"), "k", frozenset(ALL_SCOPES - {scope}))
    with pytest.raises(RefusedError, match=scope.name.lower()) as refused:
        identity.require(scope)
    assert refused.value.reason == "PERMISSION_DENIED"


def test_hashes_are_keyed_and_the_text_is_nowhere_in_the_record() -> None:
    record, text = made()
    secret_part = text.partition(".")[2]
    assert secret_part not in str(record)
    assert secret_part.encode() not in record.SerializeToString()
    assert secret_part not in repr(key_of(record))
    assert read_secrets(_OLD).newest.hash(text) != record.hash
    assert key_id_of(text) == record.key.key_id


def test_keys_outlive_a_change_of_the_secret_while_the_old_one_is_there() -> None:
    old = read_secrets(_OLD)
    record, text = make_key(
        pb.CreateKeyRequest(tenant="t", scopes=[pb.SCOPE_READ]), old, now_unix_s=_NOW
    )
    keys, tenants = {record.key.key_id: key_of(record)}, {"t": Tenant("t")}
    both = Keyring(read_secrets(f"# newest first\n{_NEW}\n{_OLD}\n"), keys, tenants)
    assert isinstance(identified(both, text), Identity)
    alone = Keyring(_SECRETS, keys, tenants)
    assert identified(alone, text) == "UNAUTHENTICATED: The API key is not valid."


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "short", f"{_NEW}\nshort"])
def test_a_file_without_good_secrets_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="secret"):
        read_secrets(text)


def test_a_rotated_key_goes_on_for_a_while() -> None:
    record, text = made(note="for tests", lifetime_s=1000)
    successor, _ = make_key(
        successor_of(record.key, now_unix_s=_NOW + 100), _SECRETS, now_unix_s=_NOW + 100
    )
    assert (successor.key.tenant, successor.key.note) == ("t", "for tests")
    assert successor.key.expires_unix_s == _NOW + 1100
    record.key.CopyFrom(ending(record.key, overlap_s=60, now_unix_s=_NOW + 100))
    ring = keyring(record)
    assert isinstance(identified(ring, text, _NOW + 159), Identity)
    assert identified(ring, text, _NOW + 160) == "UNAUTHENTICATED: The API key is not valid."
    assert ending(record.key, overlap_s=9999, now_unix_s=_NOW).expires_unix_s == _NOW + 160


def test_what_is_no_good_any_more_is_not_rotated() -> None:
    record, _ = made(lifetime_s=10)
    for changed in ({"revoked": True}, {"expires_unix_s": _NOW}):
        key = pb.ApiKey()
        key.CopyFrom(record.key)
        key.MergeFrom(pb.ApiKey(**changed))
        with pytest.raises(RefusedError, match="revoked or has expired"):
            successor_of(key, now_unix_s=_NOW + 20)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "a"),
        ({"authorization": "Basic a", "x-api-key": "b"}, "b"),
    ],
)
def test_where_a_key_stands(metadata: dict[str, str], text: str) -> None:
    assert bearer_of(metadata) == text


@pytest.mark.parametrize("metadata", [{}, {"authorization": "Basic YTpi"}])
def test_no_key_says_how_to_send_one(metadata: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match="Authorization: Bearer"):
        bearer_of(metadata)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "A"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "a", "models": [""]}, "models[0]"),
        ({"name": "a", "models": ["m"] * 257}, "models"),
        ({"name": "a", "priority_classes": ["FAST"]}, "priority_classes[0]"),
        ({"name": "a", "weight": 1001}, "weight"),
        ({"name": "a", "limits": {"request_burst": 3}}, "limits.request_burst"),
        (
            {"name": "a", "limits": {"request_burst": 0, "requests_per_min": 3}},
            "limits.request_burst",
        ),
        ({"name": "a", "limits": {"tokens_per_min": 10**13}}, "limits.tokens_per_min"),
        ({"name": "a", "model_limits": {"m": {"token_burst": 1}}}, "model_limits.token_burst"),
    ],
)
def test_a_tenant_that_is_wrong_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusedError) as refused:
        check_tenant(pb.Tenant(**fields))
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)


@pytest.mark.parametrize("fields", [{}, {"scopes": [0]}, {"scopes": [7]}, {"note": "x" * 201}])
def test_a_key_that_is_wrong_is_refused(fields: dict[str, Any]) -> None:
    request = pb.CreateKeyRequest(tenant="t", **fields)
    if "note" in fields:
        request.scopes.append(pb.SCOPE_READ)
    with pytest.raises(RefusedError) as refused:
        make_key(request, _SECRETS, now_unix_s=_NOW)
    assert refused.value.reason == "INVALID_ARGUMENT"


def test_a_tenant_asks_what_it_may() -> None:
    tenant = tenant_of(pb.Tenant(name="t", models=["chat", "code-*"], priority_classes=["BATCH"]))
    for name in ("chat", "chat@2", "code-small", "code-small@1"):
        tenant.check(name, "BATCH")
    for name in ("chatty", "other", "xcode-", "embed@1"):
        with pytest.raises(RefusedError) as refused:
            tenant.check(name, "BATCH")
        assert (refused.value.reason, refused.value.param) == ("PERMISSION_DENIED", "model")
    with pytest.raises(RefusedError, match="class BATCH only"):
        tenant.check("chat", "REALTIME")
    Tenant("all").check("anything", "REALTIME")


def test_limits_that_are_absent_do_not_limit() -> None:
    free = tenant_of(pb.Tenant(name="t"))
    none = tenant_of(pb.Tenant(name="t", limits={"requests_per_min": 0}))
    one = tenant_of(pb.Tenant(name="t", model_limits={"m": {"concurrent": 2}}))
    assert [each.is_limited for each in (free, none, one)] == [False, True, True]
    assert none.limits.requests_per_min == 0
    assert one.model_limits["m"].concurrent == 2


def test_what_is_not_listed_needs_admin() -> None:
    assert scope_of_method("/forebay.router.v1.KeyService/CreateKey") is Scope.ADMIN
    assert scope_of_method("/new.Service/Method") is Scope.ADMIN
    assert scope_of_method("/grpc.health.v1.Health/Check") is None
    assert scope_of_route("/health/live") is None
    assert scope_of_route("/v1/anything") is Scope.INFERENCE


def test_routers_know_one_another() -> None:
    gate = KeyGate(lambda: keyring(), _SECRETS, wall_clock=lambda: _NOW)
    token = _SECRETS.router_token()
    assert Scope.ROUTER in gate.identify({"authorization": f"Bearer {token}"}).scopes
    both = KeyGate(lambda: keyring(), read_secrets(f"{_NEW}\n{_OLD}"))
    old_token = read_secrets(_OLD).router_token()
    assert Scope.ROUTER in both.identify({"authorization": f"Bearer {old_token}"}).scopes
    assert Scope.INFERENCE not in both.identify({"authorization": f"Bearer {old_token}"}).scopes


def test_whoever_holds_the_file_may_make_keys_and_ask_no_model() -> None:
    gate = KeyGate(lambda: keyring(), _SECRETS)
    token = _SECRETS.operator_token()
    assert gate.identify({"authorization": f"Bearer {token}"}).scopes == {Scope.READ, Scope.ADMIN}
    for wrong in (read_secrets(_OLD).operator_token(), token[:-1], token + "a", "fbo-"):
        with pytest.raises(ForebayError) as refused:
            gate.identify({"authorization": f"Bearer {wrong}"})
        assert refused.value.reason is Reason.UNAUTHENTICATED
    assert not _SECRETS.is_router_token(token)
    assert not _SECRETS.is_operator_token(_SECRETS.router_token())
