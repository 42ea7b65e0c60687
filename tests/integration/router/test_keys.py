"""Keys end to end: whoever has none gets nowhere, and no part of a secret is left anywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import pytest
from click.testing import CliRunner, Result
from forebay.router.v1 import key_service_pb2 as pb
from forebay.router.v1 import key_service_pb2_grpc as key_rpc
from forebay_client import AsyncClient, NotAllowed
from forebay_client.cli import forebay
from forebay_common.apikeys import new_secret, read_secrets
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
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from tests.integration.router.conftest import (
    CHAT,
    RunningRouter,
    StartRouter,
    StartStandIn,
    eventually,
)
from tests.mesh import Mesh, running, simulated

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("catalogue")]

FOLLOWS_S = 5.0
SERVICES = {
    "forebay.inference.v1.InferenceService",
    "forebay.router.v1.RouterService",
    "forebay.router.v1.KeyService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(new_secret() + "\n")
    return path


@dataclasses.dataclass
class Ring:
    """Keys of all kinds, by what they are."""

    good: dict[Scope, str]
    expired: str
    revoked: str


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

    scopes = (Scope.INFERENCE, Scope.READ, Scope.ADMIN)
    return Ring(
        good={scope: await make(scope) for scope in scopes},
        expired=await make(Scope.ADMIN, age_s=60),
        revoked=await make(Scope.ADMIN, revoked=True),
    )


@pytest.fixture
async def ring(store: Store, keys: Keys, secret_file: Path) -> Ring:
    return await make_ring(store, keys, secret_file)


@pytest.fixture
async def router(
    ring: Ring, secret_file: Path, start_router: StartRouter, start_stand_in: StartStandIn
) -> RunningRouter:
    await start_stand_in()
    running = await start_router(key_secret_file=str(secret_file), no_replica_wait_s=1)

    async def knows() -> bool:
        headers = {"authorization": f"Bearer {ring.good[Scope.INFERENCE]}"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{running.url}/v1/models", headers=headers) as answer,
        ):
            return answer.status == 200

    await eventually(knows)
    return running


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


def routes() -> list[tuple[str, str]]:
    """Every method and path of the HTTP side."""
    front = OpenAIFront(
        cast("Any", None),
        cast("Any", None),
        CollectorRegistry(),
        HttpLimits(),
        not_ready=lambda: (),
        gate=OpenGate(),
    )
    found = [(method, path) for path, each in front._routes.items() for method in each]
    return [*found, ("GET", "/v1/models/chat")]


async def test_no_route_answers_without_a_good_key(router: RunningRouter, ring: Ring) -> None:
    checked = 0
    async with aiohttp.ClientSession() as http:
        for method, path in routes():
            needed = ROUTE_SCOPES.get(path, Scope.INFERENCE)
            if needed is None:
                assert path.startswith("/health/")
                continue
            for kind, key in bad_keys(ring, needed).items():
                for headers in _ways(key):
                    async with http.request(
                        method, router.url + path, headers=headers, json=_body(method)
                    ) as answer:
                        said = await answer.text()
                    expected = 403 if kind == "wrong scope" else 401
                    assert answer.status == expected, (method, path, kind, said)
                    if method != "HEAD":
                        _is_one_error(json.loads(said), expected)
                    assert key is None or not key or key not in said
                    checked += 1
    assert checked > 15 * 9


def _ways(key: str | None) -> list[dict[str, str]]:
    if key is None:
        return [{}]
    return [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]


def _body(method: str) -> dict[str, Any] | None:
    messages = [{"role": "user", "content": "Hello?"}]
    return {"model": "chat", "messages": messages} if method == "POST" else None


def _is_one_error(document: dict[str, Any], status: int) -> None:
    error = document["error"]
    code = "invalid_api_key" if status == 401 else "permission_denied"
    assert code in (error.get("code"), error.get("type")) or error["type"] == {
        401: "authentication_error",
        403: "permission_error",
    }.get(status)
    assert error["message"].endswith(".")


def _methods(address: str, key: str) -> set[str]:
    """Every method of every service that a server tells by reflection."""
    interceptor = _WithKey(key)
    with grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, interceptor)
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


async def test_no_method_answers_without_a_good_key(router: RunningRouter, ring: Ring) -> None:
    address = router.instance.addresses["grpc"]
    served = await asyncio.to_thread(_methods, address, ring.good[Scope.READ])
    assert {method.split("/")[1] for method in served} == SERVICES
    peer = router.instance.addresses["peer"]
    quota = {method for method in METHOD_SCOPES if "QuotaService" in method}
    checked = 0
    for where, methods in ((address, served), (peer, quota)):
        async with connect(where) as channel:
            for method in sorted(methods):
                needed = METHOD_SCOPES.get(method, Scope.ADMIN)
                if needed is None:
                    assert method.startswith("/grpc.health.v1.Health/")
                    continue
                for kind, key in bad_keys(ring, needed).items():
                    if kind == "empty":
                        # No gRPC client sends a value that ends in a space.
                        continue
                    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
                    code, details = await _call(channel, method, metadata)
                    expected = (
                        grpc.StatusCode.PERMISSION_DENIED
                        if kind == "wrong scope"
                        else grpc.StatusCode.UNAUTHENTICATED
                    )
                    assert code is expected, (method, kind, details)
                    assert details.endswith(".")
                    assert not key or key not in details
                    checked += 1
    assert checked > 12 * 8


async def _call(
    channel: grpc.aio.Channel, method: str, metadata: Any
) -> tuple[grpc.StatusCode, str]:
    # As far as a refusal, all kinds of call are the same on the wire.
    try:
        await channel.unary_unary(method)(b"", metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, "answered."


async def test_unknown_routes_and_methods_are_no_way_in(router: RunningRouter) -> None:
    async with aiohttp.ClientSession() as http, http.post(router.url + "/v1/files") as answer:
        assert answer.status == 404
    async with connect(router.instance.addresses["grpc"]) as channel:
        for method in ("/forebay.router.v1.KeyService/Nothing", "/any.Service/Method"):
            code, _ = await _call(channel, method, [])
            assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


async def test_a_good_key_may_do_what_its_scope_says(router: RunningRouter, ring: Ring) -> None:
    async with aiohttp.ClientSession() as http:
        for path, scope, method in (
            (CHAT, Scope.INFERENCE, "POST"),
            ("/v1/models", Scope.INFERENCE, "GET"),
            ("/metrics", Scope.READ, "GET"),
        ):
            for key in (ring.good[scope], ring.good[Scope.ADMIN]):
                for headers in _ways(key):
                    async with http.request(
                        method, router.url + path, headers=headers, json=_body(method)
                    ) as answer:
                        assert answer.status == 200, await answer.text()


# --- The command ---------------------------------------------------------------------------------

Run = Callable[..., Any]


@pytest.fixture
async def routers(
    secret_file: Path, start_router: StartRouter, start_stand_in: StartStandIn
) -> list[RunningRouter]:
    await start_stand_in()
    return [await start_router(key_secret_file=str(secret_file)) for _ in range(3)]


@pytest.fixture
def run(routers: list[RunningRouter], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, against the first router."""
    monkeypatch.setenv("FOREBAY_ADDRESS", routers[0].instance.addresses["grpc"])
    monkeypatch.delenv("FOREBAY_API_KEY", raising=False)

    async def run(*arguments: str, **environment: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke, forebay, arguments, env=environment or None
        )

    return run


async def test_the_command_makes_rotates_and_revokes_keys_that_all_routers_follow(
    routers: list[RunningRouter], run: Run, secret_file: Path
) -> None:
    operator = ("--secret-file", str(secret_file))
    assert (await run("tenants", "set", "acme")).exit_code != 0
    made = await run(
        "tenants", "set", "acme", "--model", "ch*", "--concurrent", "4",
        "--limit-model", "chat", "requests_per_min=600,request_burst=50", *operator,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    admin = (await run("keys", "create", "acme", "--scope", "admin", *operator)).stdout.strip()
    by_key = ("--key", admin)
    created = await run("keys", "create", "acme", "--note", "tests", "--json", *by_key)
    key = json.loads(created.stdout)
    assert key["scopes"] == ["inference"]
    await _followed(routers, key["text"], is_good=True)

    listed = await run("keys", "list", "--json", *by_key)
    by_id = {each["key_id"]: each for each in json.loads(listed.stdout)}
    assert by_id[key["key_id"]]["note"] == "tests"
    assert key["text"].partition(".")[2] not in listed.stdout
    tenants = json.loads((await run("tenants", "list", "--json", *by_key)).stdout)
    assert tenants[0]["models"] == ["ch*"]
    assert tenants[0]["model_limits"]["chat"]["requests_per_min"] == "600"
    assert "chat: 600 requests_per_min" in (await run("tenants", "list", *by_key)).stdout

    rotated = await run("keys", "rotate", key["key_id"], "--overlap", "1h", *by_key)
    successor = rotated.stdout.splitlines()[0]
    await _followed(routers, successor, is_good=True)
    await _followed(routers, key["text"], is_good=True)
    assert (await run("keys", "revoke", key["key_id"], *by_key)).exit_code == 0
    await _followed(routers, key["text"], is_good=False)
    await _followed(routers, successor, is_good=True)

    chatted = await run("models", "--json", FOREBAY_API_KEY=admin)
    assert [model["name"] for model in json.loads(chatted.stdout)] == ["chat"]
    refused = await run("models", FOREBAY_API_KEY=key["text"])
    assert refused.exit_code == 1
    assert "The API key is not valid. [UNAUTHENTICATED]" in refused.output
    assert (await run("tenants", "delete", "acme", "--yes", *operator)).exit_code == 0
    await _followed(routers, successor, is_good=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("keys", "create", "nobody"), "The tenant does not exist."),
        (("keys", "revoke", "aaaaaaaaaaaaa"), "No key has this id."),
        (("keys", "create", "acme", "--lifetime", "soon"), "such as 30d"),
        (("tenants", "set", "Not A Name"), "must be 1 to 64"),
        (("tenants", "set", "acme", "--limit-model", "chat", "speed=3"), "requests_per_min"),
        (("tenants", "set", "acme", "--token-burst", "5"), "tokens_per_min"),
    ],
)
async def test_the_command_says_in_one_line_what_is_wrong(
    run: Run, secret_file: Path, arguments: tuple[str, ...], says: str
) -> None:
    refused = await run(*arguments, "--secret-file", str(secret_file))
    assert refused.exit_code != 0
    assert says in refused.output


async def test_the_holder_of_the_file_may_ask_no_model(
    routers: list[RunningRouter], secret_file: Path
) -> None:
    token = read_secrets(secret_file.read_text()).operator_token()
    async with AsyncClient(routers[0].instance.addresses["grpc"], api_key=token) as client:
        await client.models()
        with pytest.raises(NotAllowed):
            await client.generate("chat", "Hello?")


async def _followed(routers: list[RunningRouter], key: str, *, is_good: bool) -> None:
    """All routers come to let a key in, or no longer."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:

        async def is_let_in(router: RunningRouter) -> bool:
            async with http.get(f"{router.url}/v1/models") as answer:
                assert answer.status in (200, 401)
                return answer.status == 200

        async def holds() -> bool:
            return all([await is_let_in(router) is is_good for router in routers])

        assert await eventually(holds, within_s=FOLLOWS_S) <= FOLLOWS_S


# --- Canaries ------------------------------------------------------------------------------------


@pytest.fixture
async def mesh(
    tmp_path: Path, etcd: str, secret_file: Path
) -> AsyncIterator[tuple[Mesh, dict[str, str]]]:
    """Real processes with all logs on, every request traced."""
    spec = simulated()
    directory = tmp_path / "mesh"
    directory.mkdir()
    environment = {
        "FOREBAY_ROUTER_OPEN": "false",
        "FOREBAY_ROUTER_KEY_SECRET_FILE": str(secret_file),
        "FOREBAY_LOG_LEVEL": "DEBUG",
    }
    async with running(directory, etcd, f"/keys-{os.getpid()}", spec, router=environment) as mesh:
        mesh.add_replica("r1", spec)
        yield mesh, environment


@pytest.mark.timeout(120)
async def test_no_part_of_a_key_is_left_anywhere(
    mesh: tuple[Mesh, dict[str, str]], secret_file: Path
) -> None:
    fleet, _ = mesh
    operator = read_secrets(secret_file.read_text()).operator_token()
    canaries: dict[str, str] = {}
    async with connect(fleet.grpc) as channel:
        admin = key_rpc.KeyServiceStub(channel)
        right = [("authorization", f"Bearer {operator}")]
        await admin.PutTenant(
            pb.PutTenantRequest(tenant=pb.Tenant(name="acme")), metadata=right, timeout=20
        )
        request = pb.CreateKeyRequest(tenant="acme", scopes=[pb.SCOPE_ADMIN])
        for name in ("used", "rotated", "revoked"):
            made = await admin.CreateKey(request, metadata=right, timeout=20)
            canaries[name] = made.text
            if name == "rotated":
                turned = await admin.RotateKey(
                    pb.RotateKeyRequest(key_id=made.key.key_id, overlap_s=60), metadata=right
                )
                canaries["successor"] = turned.text
            if name == "revoked":
                await admin.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id), metadata=right)
    canaries["unknown"] = "fb-aaaaaaaaaaaaa." + secrets.token_urlsafe(32)
    canaries["broken"] = "sk-" + secrets.token_urlsafe(48)
    await _use(fleet, canaries)
    page = await _metrics(fleet, canaries["used"])
    await asyncio.to_thread(fleet.router.terminate)
    await asyncio.to_thread(fleet.router.wait, 20)

    used_id = canaries["used"][3:].partition(".")[0]
    needles = {
        **{name: text.rpartition(".")[2].encode() for name, text in canaries.items()},
        "operator": operator[4:].encode(),
        "file": secret_file.read_text().strip().encode(),
    }
    found: list[str] = []
    has_id = False
    haystacks = {"metrics": page.encode()}
    for path in fleet.directory.rglob("*"):
        if path.is_file():
            haystacks[path.name] = path.read_bytes()
    async with Store.open([fleet.etcd]) as store:
        for key, entry in (await store.list("/")).entries.items():
            haystacks[f"etcd {key}"] = key.encode() + entry.value
            has_id |= used_id in key
    for (name, needle), (where, hay) in itertools.product(needles.items(), haystacks.items()):
        if needle in hay or needle[:20] in hay:
            found.append(f"{name} in {where}")
    assert found == []
    # The search would find something: ids are public, and spans and logs were written.
    assert has_id
    assert b"acme" in b"".join(haystacks.values())
    assert fleet.reader().newest(50)


async def _use(fleet: Mesh, canaries: dict[str, str]) -> None:
    """Show each key in every way, well and wrongly."""
    async with aiohttp.ClientSession() as http:

        async def answered() -> bool:
            headers = {"authorization": f"Bearer {canaries['used']}"}
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}
            async with http.post(
                f"http://{fleet.http}{CHAT}", json=body, headers=headers
            ) as answer:
                return answer.status == 200

        await eventually(answered, within_s=30)
        for key in canaries.values():
            for method, path in routes():
                for headers in _ways(key):
                    headers["traceparent"] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
                    async with http.request(
                        method,
                        f"http://{fleet.http}{path}",
                        headers=headers,
                        json=_body(method),
                    ) as answer:
                        assert key not in await answer.text()
    async with connect(fleet.grpc) as channel:
        for key in canaries.values():
            for method in (name for name, scope in METHOD_SCOPES.items() if scope is not None):
                for metadata in (
                    [("authorization", f"Bearer {key}")],
                    [("authorization", key)],
                    [("x-api-key", key)],
                ):
                    await _call(channel, method, metadata)


async def _metrics(fleet: Mesh, key: str) -> str:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{fleet.http}/metrics", headers=headers) as answer,
    ):
        assert answer.status == 200
        return await answer.text()
