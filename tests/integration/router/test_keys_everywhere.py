"""Keys against real processes: no way in without a good one, and no part of one left anywhere."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import forebay
import grpc
import pytest
from click.testing import CliRunner
from forebay.router.v1 import key_service_pb2 as pb
from forebay.router.v1 import key_service_pb2_grpc as key_rpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay_client.cli import forebay as command
from forebay_common.apikeys import read_secrets
from forebay_common.channel import connect
from forebay_common.discovery import Keys
from forebay_common.store import Store
from forebay_router.adapters.keys import KeyStore
from forebay_router.adapters.openai import OpenAIFront
from forebay_router.core.access import METHOD_SCOPES, ROUTE_SCOPES, Scope
from forebay_router.core.keys import make_key
from forebay_router.gate import OpenGate
from forebay_wire.core.http1 import HttpLimits
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from tests.integration.router.conftest import CHAT, eventually
from tests.mesh import STARTED_S, Mesh, running, simulated

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOLD = {
    "forebay.inference.v1.InferenceService",
    "forebay.router.v1.RouterService",
    "forebay.router.v1.KeyService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}
OPEN_METHODS = {f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch")}
OPEN_ROUTES = {"/health/live", "/health/ready"}


@dataclasses.dataclass
class Ring:
    """Keys of all kinds, by what they are."""

    good: dict[Scope, str]
    expired: str
    revoked: str


@dataclasses.dataclass
class Fleet:
    """A router that asks for keys, a replica behind it, and where they all write."""

    mesh: Mesh
    addresses: dict[str, str]
    ring: Ring
    etcd_files: Path

    @property
    def url(self) -> str:
        return f"http://{self.addresses['http']}"


@pytest.fixture
async def fleet(
    tmp_path: Path,
    secret_file: Path,
    namespace: str,
    etcd: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Fleet]:
    """Real processes that log all they can and trace what they are asked to."""
    spec = simulated()
    directory = tmp_path / "mesh"
    directory.mkdir()
    environment = {
        "FOREBAY_ROUTER_OPEN": "false",
        "FOREBAY_ROUTER_KEY_SECRET_FILE": str(secret_file),
        "FOREBAY_LOG_LEVEL": "DEBUG",
    }
    async with (
        running(directory, etcd, namespace, spec, router=environment) as mesh,
        Store.open([etcd], timeout_s=STARTED_S) as store,
    ):
        mesh.add_replica("r1", spec, FOREBAY_LOG_LEVEL="DEBUG")
        ring = await make_ring(store, Keys(namespace), secret_file)
        listing = await store.list(f"{namespace}/instances/router/")
        (entry,) = listing.entries.values()
        (etcd_files,) = tmp_path_factory.getbasetemp().glob("etcd[0-9]*/data")
        fleet = Fleet(mesh, json.loads(entry.value)["addresses"], ring, etcd_files)
        await eventually(lambda: _answers(fleet, ring.good[Scope.INFERENCE]), within_s=STARTED_S)
        yield fleet


async def make_ring(store: Store, keys: Keys, secret_file: Path) -> Ring:
    kept, known = KeyStore(store, keys), read_secrets(secret_file.read_text())
    await kept.put_tenant(pb.Tenant(name="acme"))

    async def make(scope: Scope, *, age_s: int = 0, revoked: bool = False) -> str:
        request = pb.CreateKeyRequest(
            tenant="acme", scopes=[cast("Any", int(scope))], lifetime_s=1 if age_s else 0
        )
        record, text = make_key(request, known, now_unix_s=int(time.time()) - age_s)
        record.key.revoked = revoked
        await kept.add_key(record)
        return text

    return Ring(
        expired=await make(Scope.ADMIN, age_s=60),
        revoked=await make(Scope.ADMIN, revoked=True),
        good={scope: await make(scope) for scope in (Scope.READ, Scope.ADMIN, Scope.INFERENCE)},
    )


async def _answers(fleet: Fleet, key: str) -> bool:
    async with (
        aiohttp.ClientSession() as http,
        http.post(fleet.url + CHAT, json=_body("POST"), headers=_ways(key)[0]) as answer,
    ):
        return answer.status == 200


def bad_keys(ring: Ring, needed: Scope) -> dict[str, str | None]:
    """Keys that must not do, by what is wrong with them."""
    good = ring.good[needed] if needed in ring.good else ring.good[Scope.ADMIN]
    wrong = {
        Scope.INFERENCE: Scope.READ,
        Scope.READ: Scope.INFERENCE,
        Scope.ADMIN: Scope.READ,
        Scope.ROUTER: Scope.ADMIN,
    }[needed]
    return {
        "none": None,
        "empty": "",
        "nonsense": "sk-" + secrets.token_urlsafe(32),
        "other secret": good.partition(".")[0] + "." + secrets.token_urlsafe(32),
        "router": "fbr-" + secrets.token_urlsafe(32),
        "operator": "fbo-" + secrets.token_urlsafe(32),
        "expired": ring.expired,
        "revoked": ring.revoked,
        "wrong scope": ring.good[wrong],
    }


def _ways(key: str | None) -> list[dict[str, str]]:
    if key is None:
        return [{}]
    return [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]


def _body(method: str) -> dict[str, Any] | None:
    messages = [{"role": "user", "content": "Hello?"}]
    return {"model": "sim", "messages": messages} if method == "POST" else None


# --- HTTP ----------------------------------------------------------------------------------------


def routes() -> list[tuple[str, str]]:
    """Every method and path of the HTTP side, of its own table."""
    front = OpenAIFront(
        cast("Any", None),
        cast("Any", None),
        CollectorRegistry(),
        HttpLimits(),
        not_ready=lambda: (),
        gate=OpenGate(),
    )
    found = [(method, path) for path, each in front._routes.items() for method in each]
    return [*found, ("GET", "/v1/models/sim"), ("HEAD", "/v1/models/sim")]


async def test_no_route_answers_without_a_good_key(fleet: Fleet) -> None:
    refused = 0
    assert {path for path, scope in ROUTE_SCOPES.items() if scope is None} == OPEN_ROUTES
    async with aiohttp.ClientSession() as http:
        for method, path in routes():
            needed = ROUTE_SCOPES.get(path, Scope.INFERENCE)
            if needed is None:
                async with http.request(method, fleet.url + path) as answer:
                    assert answer.status == 200
                continue
            for kind, key in bad_keys(fleet.ring, needed).items():
                for headers in _ways(key):
                    async with http.request(
                        method, fleet.url + path, headers=headers, json=_body(method)
                    ) as answer:
                        said = await answer.text()
                    expected = 403 if kind == "wrong scope" else 401
                    assert answer.status == expected, (method, path, kind, said)
                    if method != "HEAD":
                        _is_one_error(json.loads(said), expected)
                    assert not key or key not in said
                    refused += 1
            for scope in (needed, Scope.ADMIN):
                for headers in _ways(fleet.ring.good[scope]):
                    async with http.request(
                        method, fleet.url + path, headers=headers, json=_body(method)
                    ) as answer:
                        said = await answer.text()
                    assert answer.status not in (401, 403), (method, path, said)
                    assert method == "POST" or answer.status == 200, (method, path, said)
        async with http.post(f"{fleet.url}/v1/files") as answer:
            assert answer.status == 404
    assert refused > 15 * 9


def _is_one_error(document: dict[str, Any], status: int) -> None:
    assert set(document) <= {"error", "type"}
    error = document["error"]
    words = {
        401: ("invalid_api_key", "authentication_error"),
        403: ("permission_denied", "permission_error"),
    }[status]
    assert error.get("code") in words or error["type"] in words, document
    assert error["message"].endswith("."), document


async def test_a_key_of_odd_characters_is_refused_like_any_other(fleet: Fleet) -> None:
    host, _, port = fleet.addresses["http"].rpartition(":")
    for key in (b"\xff\xfe", b"fbo-\xff", b"fbr-\xc3\x28", b"fb-\xe9", b"k" * 8000):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer "
            + key
            + b"\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 401 "), (key[:20], answer[:200])
        assert key not in answer


# --- gRPC ----------------------------------------------------------------------------------------


def known_methods() -> set[str]:
    """Every method of every service that has a contract here, whoever serves it."""
    files = [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    for root in map(Path, forebay.__path__):
        modules = (path.relative_to(root.parent) for path in root.rglob("*_pb2.py"))
        files += [
            importlib.import_module(".".join(path.with_suffix("").parts)).DESCRIPTOR
            for path in modules
        ]
    return {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


def _methods(address: str, key: str) -> set[str]:
    """Every method of every service that a server tells by reflection."""
    with grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, _WithKey(key))
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        return {
            f"/{service}/{method.name}"
            for service in database.get_services()
            for method in pool.FindServiceByName(service).methods
        }


class _WithKey(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]  # of no type
    def __init__(self, key: str) -> None:
        self._key = key

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self._key}")]
        return continuation(_Details(details.method, details.timeout, metadata), requests)


@dataclasses.dataclass
class _Details(grpc.ClientCallDetails):  # type: ignore[misc]  # of no type
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any = None
    wait_for_ready: Any = None
    compression: Any = None


async def test_no_method_answers_without_a_good_key(fleet: Fleet, secret_file: Path) -> None:
    ring = fleet.ring
    address, peer = fleet.addresses["grpc"], fleet.addresses["peer"]
    told = await asyncio.to_thread(_methods, address, ring.good[Scope.READ])
    assert {method.split("/")[1] for method in told} == TOLD
    known = known_methods()
    assert told < known
    assert {method for method, scope in METHOD_SCOPES.items() if scope is None} == OPEN_METHODS
    refused = 0
    for where in (address, peer):
        async with connect(where) as channel:
            # What only other services serve, and what nobody does, is no way in either.
            for method in sorted(known | {"/forebay.router.v1.KeyService/None", "/any.Any/Any"}):
                needed = METHOD_SCOPES.get(method, Scope.ADMIN)
                if needed is None:
                    continue
                for kind, key in bad_keys(ring, needed).items():
                    if kind == "empty":
                        # No gRPC client sends a value that ends in a space.
                        continue
                    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
                    code, details, _ = await _call(channel, method, metadata)
                    expected = (
                        grpc.StatusCode.PERMISSION_DENIED
                        if kind == "wrong scope"
                        else grpc.StatusCode.UNAUTHENTICATED
                    )
                    assert code is expected, (where, method, kind, details)
                    assert details.endswith(".")
                    assert not key or key not in details
                    refused += 1
    assert refused > 2 * 20 * 8
    routers_own = read_secrets(secret_file.read_text()).router_token()
    quota = {method for method in known if "QuotaService" in method}
    assert len(quota) == 2
    for where, methods in ((address, told), (peer, quota)):
        async with connect(where) as channel:
            for method in sorted(methods):
                scope = METHOD_SCOPES.get(method, Scope.ADMIN)
                if scope is None:
                    continue
                good = routers_own if scope is Scope.ROUTER else ring.good[scope]
                code, details, _ = await _call(
                    channel, method, [("authorization", f"Bearer {good}")]
                )
                assert code not in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.PERMISSION_DENIED,
                    grpc.StatusCode.UNIMPLEMENTED,
                ), (method, details)


async def _call(
    channel: grpc.aio.Channel, method: str, metadata: Any, message: bytes = b""
) -> tuple[grpc.StatusCode, str, bytes]:
    # As far as a refusal, all kinds of call are the same on the wire.
    try:
        answer = await channel.unary_unary(method)(message, metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", repr(error.trailing_metadata()).encode()
    return grpc.StatusCode.OK, "", cast("bytes", answer)


# --- Canaries ------------------------------------------------------------------------------------


def forms(secret: bytes) -> Iterator[bytes]:
    """How a text may lie in a file: as it is, cut off, in hexadecimal, in base64."""
    yield secret[:20]
    yield secret[-20:]
    yield secret[:20].hex().encode()
    for shift in range(3):
        # Of the characters that no neighbour has a share in.
        whole = base64.b64encode(b"\0" * shift + secret[:30])
        yield whole[4 if shift else 0 : 36]


def search(needles: Mapping[str, bytes], haystacks: Mapping[str, bytes]) -> list[str]:
    """Which secret is found where."""
    return [
        f"{name} in {where}"
        for name, secret in needles.items()
        for form in set(forms(secret))
        for where, hay in haystacks.items()
        if form in hay
    ]


def test_the_search_finds_what_is_there() -> None:
    secret = secrets.token_urlsafe(32).encode()
    for planted in (
        b"x" + secret + b"y",
        b"cut " + secret[:24],
        secret.hex().encode(),
        *(base64.b64encode(b"k" * before + secret + b"z") for before in range(3)),
        json.dumps({"authorization": f"Bearer {secret.decode()}"}).encode(),
    ):
        found = search({"planted": secret}, {"here": planted, "there": b"nothing"})
        assert set(found) == {"planted in here"}, planted


async def test_no_part_of_a_key_is_left_anywhere(
    fleet: Fleet, secret_file: Path, tmp_path: Path
) -> None:
    operator = read_secrets(secret_file.read_text()).operator_token()
    canaries = await _make_canaries(fleet, operator)
    said, trace_ids = await _use(fleet, {**canaries, "operator": operator})
    said += await _use_the_command(fleet, canaries, tmp_path)
    reader = fleet.mesh.reader()
    await eventually(lambda: any(reader.spans(each) for each in trace_ids), within_s=STARTED_S)
    page = await _metrics(fleet, canaries["used"])
    await asyncio.to_thread(fleet.mesh.router.terminate)
    await asyncio.to_thread(fleet.mesh.router.wait, 20)

    files = {
        f"{name}/{path.relative_to(root)}": path.read_bytes()
        for name, root in (("here", tmp_path), ("etcd", fleet.etcd_files))
        for path in root.rglob("*")
        if path.is_file() and path != secret_file
    }
    async with Store.open([fleet.mesh.etcd], timeout_s=STARTED_S) as store:
        stored = {
            f"etcd {key}": key.encode() + b"\n" + entry.value
            for key, entry in (await store.list("/")).entries.items()
        }
    needles = {
        **{name: text.rpartition(".")[2].encode() for name, text in canaries.items()},
        "operator's token": operator[4:].encode(),
        "file of secrets": secret_file.read_text().strip().encode(),
    }
    assert search(needles, {**files, **stored, "metrics": page, "answers": said}) == []

    # Each place was searched, and holds what calls leave there.
    used_id = canaries["used"][3:].partition(".")[0].encode()
    assert any(used_id in value for value in stored.values())
    assert any(used_id in files[name] for name in files if name.startswith("etcd/"))
    spans = b"".join(files[name] for name in files if name.startswith("here/mesh/spans.db"))
    assert any(trace_id.encode() in spans for trace_id in trace_ids)
    (log,) = (files[name] for name in files if name.startswith("here/mesh/router-"))
    assert b"serving on" in log
    assert [name for name in files if name.startswith("here/mesh/batcher-")]
    assert b"forebay_router_requests_total{" in page
    assert b'model="sim@1"' in page
    assert used_id in said


async def _make_canaries(fleet: Fleet, operator: str) -> dict[str, str]:
    """Keys that are made, turned over and ended as callers do it; and two that never were good."""
    canaries: dict[str, str] = {}
    request = pb.CreateKeyRequest(tenant="acme", scopes=[pb.SCOPE_ADMIN], note="canary")
    async with connect(fleet.addresses["grpc"]) as channel:
        keys = key_rpc.KeyServiceStub(channel)
        right: Any = [("authorization", f"Bearer {operator}")]
        for name in ("used", "rotated", "revoked"):
            made = await keys.CreateKey(request, metadata=right, timeout=20)
            canaries[name] = made.text
            if name == "rotated":
                turned = await keys.RotateKey(
                    pb.RotateKeyRequest(key_id=made.key.key_id, overlap_s=60),
                    metadata=right,
                    timeout=20,
                )
                canaries["successor"] = turned.text
            if name == "revoked":
                await keys.RevokeKey(
                    pb.RevokeKeyRequest(key_id=made.key.key_id), metadata=right, timeout=20
                )
    await eventually(lambda: _answers(fleet, canaries["successor"]))
    canaries["unknown"] = "fb-aaaaaaaaaaaaa." + secrets.token_urlsafe(32)
    canaries["broken"] = "sk-" + secrets.token_urlsafe(48)
    return canaries


async def _use(fleet: Fleet, keys: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Show each key to everything, in every way, well and wrongly; every request is traced.

    Returns what was answered, and the traces' ids.
    """
    said: list[bytes] = []
    trace_ids: list[str] = []
    async with aiohttp.ClientSession() as http:
        for key in keys.values():
            ways = [
                *_ways(key),
                {"authorization": key},
                {"authorization": f"Basic {key}"},
                {"cookie": f"key={key}"},
            ]
            for method, path in routes():
                for headers in ways:
                    trace_ids.append(secrets.token_hex(16))
                    headers["traceparent"] = f"00-{trace_ids[-1]}-{secrets.token_hex(8)}-01"
                    async with http.request(
                        method,
                        f"{fleet.url}{path}?api_key={key}",
                        headers=headers,
                        json=_body(method),
                    ) as answer:
                        said += [repr(answer.headers).encode(), await answer.read()]
                        request_id = answer.headers.get("x-request-id", "")
    told = await asyncio.to_thread(_methods, fleet.addresses["grpc"], keys["used"])
    explain = "/forebay.router.v1.RouterService/ExplainRequest"
    asked = router_pb.ExplainRequestRequest(request_id=request_id).SerializeToString()
    async with (
        connect(fleet.addresses["grpc"]) as channel,
        connect(fleet.addresses["peer"]) as peer,
    ):
        for key in keys.values():
            for method in sorted(told - OPEN_METHODS):
                for metadata in (
                    [("authorization", f"Bearer {key}")],
                    [("authorization", key)],
                    [("x-api-key", key)],
                ):
                    message = asked if method == explain else b""
                    for each in await _call(channel, method, metadata, message):
                        said.append(each if isinstance(each, bytes) else str(each).encode())
            for method in (name for name, scope in METHOD_SCOPES.items() if scope is Scope.ROUTER):
                for each in await _call(peer, method, [("authorization", f"Bearer {key}")]):
                    said.append(each if isinstance(each, bytes) else str(each).encode())
    return b"\n".join(said), trace_ids


async def _use_the_command(fleet: Fleet, keys: Mapping[str, str], home: Path) -> bytes:
    """What the command prints and leaves; of what shows a key it must print one, and is not run."""
    said = b""
    runs: Iterable[tuple[str, ...]] = (
        ("models",),
        ("status",),
        ("keys", "list", "--json"),
        ("tenants", "list"),
        ("why", "nothing"),
        ("chat", "Hello?", "--model", "sim", "--max-tokens", "3"),
    )
    environment = {
        "HOME": str(home),
        "FOREBAY_STATE_DIR": str(home / "state"),
        "FOREBAY_ADDRESS": fleet.addresses["grpc"],
    }
    for key in keys.values():
        for arguments in runs:
            result = await asyncio.to_thread(
                CliRunner().invoke, command, arguments, env={**environment, "FOREBAY_API_KEY": key}
            )
            said += result.output.encode() + repr(result.exception).encode()
    return said


async def _metrics(fleet: Fleet, key: str) -> bytes:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{fleet.url}/metrics", headers=_ways(key)[0]) as answer,
    ):
        assert answer.status == 200
        return await answer.read()
