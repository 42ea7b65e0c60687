"""Registries over a real etcd."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.discovery import Instance, Keys
from forebay_common.errors import Reason, from_rpc_error
from forebay_common.store import Store
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

pytestmark = pytest.mark.integration

Start = Callable[..., Awaitable[Any]]
Put = Callable[..., registry.PutVersionRequest]


async def refused(call: Awaitable[Any]) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value).reason


def split_request(model: str, revision: int = 0, **weights: int) -> registry.SetSplitRequest:
    return registry.SetSplitRequest(
        model=model,
        split=[registry.SplitEntry(version=v, weight=w) for v, w in weights.items()],
        expected_revision=revision,
    )


def alias_request(name: str, target: str) -> registry.PutAliasRequest:
    return registry.PutAliasRequest(alias=registry.Alias(name=name, target=target))


async def test_a_model_lives_from_its_first_version_to_its_last(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    stub = (await start(etcd, namespace)).stub
    first = (await stub.PutVersion(put_request())).model
    second = (await stub.PutVersion(put_request(version="v2"))).model
    assert second.revision > first.revision > 0
    assert (await stub.PutVersion(put_request(version="v2"))).model == second
    assert (await stub.GetModel(registry.GetModelRequest(name="chat"))).model == second
    delete = registry.DeleteVersionRequest(model="chat", version="v1")
    assert await refused(stub.DeleteVersion(delete)) is Reason.VERSION_IN_USE
    third = (await stub.SetSplit(split_request("chat", second.revision, v2=1))).model
    assert [(e.version, e.weight) for e in third.split] == [("v2", 1)]
    await stub.DeleteVersion(delete)
    await stub.DeleteVersion(delete)
    await stub.DeleteVersion(registry.DeleteVersionRequest(model="chat", version="v2"))
    get = stub.GetModel(registry.GetModelRequest(name="chat"))
    assert await refused(get) is Reason.MODEL_NOT_FOUND
    listed = (await stub.ListModels(registry.ListModelsRequest())).catalogue
    assert (list(listed.models), list(listed.aliases)) == ([], [])


async def test_refusals_carry_their_reason(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    stub = (await start(etcd, namespace)).stub
    await stub.PutVersion(put_request())
    changed = put_request(artifact_path="/elsewhere")
    assert await refused(stub.PutVersion(changed)) is Reason.VERSION_IMMUTABLE
    assert await refused(stub.PutVersion(put_request("../chat"))) is Reason.INVALID_ARGUMENT
    assert await refused(stub.SetSplit(split_request("none", v1=1))) is Reason.MODEL_NOT_FOUND
    assert await refused(stub.SetSplit(split_request("chat", 1, v1=1))) is Reason.CONFLICT
    assert await refused(stub.PutAlias(alias_request("chat", "chat"))) is Reason.INVALID_ARGUMENT
    assert await refused(stub.PutAlias(alias_request("a", "none"))) is Reason.MODEL_NOT_FOUND
    await stub.PutAlias(alias_request("a", "chat@v1"))
    assert await refused(stub.PutAlias(alias_request("b", "a"))) is Reason.INVALID_ARGUMENT
    assert await refused(stub.PutVersion(put_request("a"))) is Reason.INVALID_ARGUMENT
    for name in ("", "..", "a/b", "x" * 100):
        get = stub.GetModel(registry.GetModelRequest(name=name))
        assert await refused(get) is Reason.MODEL_NOT_FOUND


async def test_of_many_splits_on_one_revision_exactly_one_wins(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    one, two = await asyncio.gather(start(etcd, namespace), start(etcd, namespace))
    await one.stub.PutVersion(put_request())
    model = (await one.stub.PutVersion(put_request(version="v2"))).model
    answers = await asyncio.gather(
        *(
            each.stub.SetSplit(split_request("chat", model.revision, v1=100 - i, v2=i + 1))
            for i, each in enumerate([one, two] * 10)
        ),
        return_exceptions=True,
    )
    won = [answer for answer in answers if not isinstance(answer, BaseException)]
    lost = [from_rpc_error(a).reason for a in answers if isinstance(a, grpc.aio.AioRpcError)]
    assert len(won) == 1
    assert lost == [Reason.CONFLICT] * 19
    now = (await two.stub.GetModel(registry.GetModelRequest(name="chat"))).model
    assert now == won[0].model


async def test_concurrent_versions_of_one_model_are_all_kept(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    one, two = await asyncio.gather(
        start(etcd, namespace, write_attempts=50), start(etcd, namespace, write_attempts=50)
    )
    await asyncio.gather(
        *(
            each.stub.PutVersion(put_request(version=f"v{i}"))
            for i, each in enumerate([one, two] * 6)
        )
    )
    model = (await one.stub.GetModel(registry.GetModelRequest(name="chat"))).model
    assert {v.version for v in model.versions} == {f"v{i}" for i in range(12)}
    assert len(model.split) == 1


async def test_attempts_are_bounded(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    running = await start(etcd, namespace, write_attempts=1)
    answers = await asyncio.gather(
        *(running.stub.PutVersion(put_request(version=f"v{i}")) for i in range(10)),
        return_exceptions=True,
    )
    reasons = {from_rpc_error(a).reason for a in answers if isinstance(a, grpc.aio.AioRpcError)}
    assert reasons == {Reason.CONFLICT}


async def test_no_race_leaves_an_alias_without_its_model_or_a_name_twice(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    one, two = await asyncio.gather(start(etcd, namespace), start(etcd, namespace))
    rng = random.Random(7)
    for i in range(20):
        name, other = f"m{i}", f"n{i}"
        await one.stub.PutVersion(put_request(name))
        calls = [
            one.stub.PutAlias(alias_request(other, name)),
            two.stub.DeleteVersion(registry.DeleteVersionRequest(model=name, version="v1")),
            two.stub.PutVersion(put_request(other)),
        ]
        rng.shuffle(calls)
        await asyncio.gather(*calls, return_exceptions=True)
    listed = (await one.stub.ListModels(registry.ListModelsRequest())).catalogue
    models = {model.name for model in listed.models}
    assert not models & {alias.name for alias in listed.aliases}
    assert {alias.target for alias in listed.aliases} <= models


async def test_a_watch_gets_the_catalogue_and_every_change_made_elsewhere(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    one, two = await asyncio.gather(start(etcd, namespace), start(etcd, namespace))
    await one.stub.PutVersion(put_request())
    watch = one.stub.WatchCatalogue(registry.WatchCatalogueRequest())
    seen: list[registry.Catalogue] = []

    async def until(condition: Callable[[registry.Catalogue], bool]) -> registry.Catalogue:
        async with asyncio.timeout(5):
            while not seen or not condition(seen[-1]):
                seen.append((await watch.read()).catalogue)
        return seen[-1]

    first = await until(lambda c: len(c.models) == 1)
    assert first.models[0].revision > 0
    changed = (await two.stub.PutVersion(put_request(version="v2"))).model
    second = await until(lambda c: len(c.models[0].versions) == 2)
    assert second.models[0] == changed
    await two.stub.PutAlias(alias_request("stable", "chat@v2"))
    third = await until(lambda c: len(c.aliases) == 1)
    await two.stub.DeleteAlias(registry.DeleteAliasRequest(name="stable"))
    fourth = await until(lambda c: not c.aliases)
    revisions = [catalogue.revision for catalogue in seen]
    assert revisions == sorted(revisions)
    assert fourth.revision > third.revision
    watch.cancel()


async def test_tiers_and_shadows_are_stored_watched_and_hold_what_they_name(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    one, two = await asyncio.gather(start(etcd, namespace), start(etcd, namespace))
    for name, version in (("little", "v1"), ("chat", "v1"), ("chat", "v2")):
        await one.stub.PutVersion(put_request(name, version=version))
    tiers = registry.Tiers(small="little", large="chat", classifier="rules", threshold=0.0)
    wanted = registry.PutAliasRequest(alias=registry.Alias(name="auto", tiers=tiers))
    alias = (await one.stub.PutAlias(wanted)).alias
    assert (alias.target, alias.tiers.default_tier) == ("chat", registry.TIER_LARGE)
    shadow = registry.Shadow(version="v2", percent=2.5)
    model = (await one.stub.SetShadow(registry.SetShadowRequest(model="chat", shadow=shadow))).model
    assert model.shadow == shadow
    watch = two.stub.WatchCatalogue(registry.WatchCatalogueRequest())
    async with asyncio.timeout(5):
        while True:
            seen = (await watch.read()).catalogue
            if len(seen.aliases) and seen.models and seen.models[0].HasField("shadow"):
                break
    watch.cancel()
    assert list(seen.aliases) == [alias]
    assert seen.aliases[0].tiers.HasField("threshold")
    assert seen.models[0] == model
    for name, version in (("little", "v1"), ("chat", "v2")):
        delete = registry.DeleteVersionRequest(model=name, version=version)
        assert await refused(two.stub.DeleteVersion(delete)) is Reason.VERSION_IN_USE
    stale = registry.SetShadowRequest(model="chat", expected_revision=model.revision - 1)
    assert await refused(two.stub.SetShadow(stale)) is Reason.CONFLICT
    end = registry.SetShadowRequest(model="chat", expected_revision=model.revision)
    assert not (await two.stub.SetShadow(end)).model.HasField("shadow")
    none = registry.SetShadowRequest(model="none", shadow=shadow)
    assert await refused(two.stub.SetShadow(none)) is Reason.MODEL_NOT_FOUND
    tiers.small = "gone"
    wanted = registry.PutAliasRequest(alias=registry.Alias(name="auto", tiers=tiers))
    assert await refused(two.stub.PutAlias(wanted)) is Reason.MODEL_NOT_FOUND


async def test_a_bootstrap_is_there_when_the_registry_is_ready_and_may_be_put_again(
    start: Start, put_request: Put, etcd: str, namespace: str
) -> None:
    text = json.dumps([json_format.MessageToDict(put_request()) for _ in range(2)])
    for _ in range(2):
        running = await start(etcd, namespace, bootstrap=text)
        listed = (await running.stub.ListModels(registry.ListModelsRequest())).catalogue
        assert [model.name for model in listed.models] == ["chat"]
        await running.stop()


async def test_it_is_announced_while_it_serves_and_gone_when_it_stops(
    start: Start, etcd: str, namespace: str
) -> None:
    running = await start(etcd, namespace)
    async with Store.open((etcd,)) as store:
        key = Keys(namespace).instance("registry", "r1")
        entry = await store.get(key)
        assert entry is not None
        assert Instance.decode(key, entry.value).addresses == {"grpc": running.address}
        await running.stop()
        assert await store.get(key) is None


async def test_without_etcd_it_is_alive_but_not_ready(
    start: Start, put_request: Put, namespace: str
) -> None:
    running = await start("127.0.0.1:1", namespace, ready=False)
    await running.health_becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await refused(running.stub.PutVersion(put_request())) is Reason.STORE_UNAVAILABLE
