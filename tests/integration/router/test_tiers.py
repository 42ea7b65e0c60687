"""A tiered alias end to end: what is asked decides which model answers, and it can be asked why."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay_common import metadata as md
from forebay_common.discovery import Keys, to_json
from forebay_common.store import Store

from tests.integration.router.conftest import (
    CHAT,
    RunningRouter,
    StartRouter,
    StartStandIn,
    eventually,
)

pytestmark = pytest.mark.integration

EASY, HARD = "Hello!", "Prove this theorem step by step and analyze the complexity."


@pytest.fixture
async def router(
    store: Store, keys: Keys, start_router: StartRouter, start_stand_in: StartStandIn
) -> RunningRouter:
    """A router before a small and a large model, chosen by rules under the name `auto`."""
    for name in ("small", "large"):
        model = registry.Model(
            name=name,
            versions=[registry.ModelVersion(version="v1")],
            split=[registry.SplitEntry(version="v1", weight=1)],
        )
        await store.put(keys.model(name), to_json(model))
    tiers = registry.Tiers(
        small="small",
        large="large",
        classifier="rules",
        default_tier=registry.TIER_LARGE,
        small_prompt_tokens_max=2000,
    )
    alias = registry.Alias(name="auto", target="large", tiers=tiers)
    await store.put(keys.alias("auto"), to_json(alias))
    stand_in = await start_stand_in("r1", announced=False)
    del stand_in.replica.models[:]
    for name in ("small", "large"):
        stand_in.replica.models.append(
            batcher.ReplicaModel(
                model_version=f"{name}@v1", state=engine.MODEL_STATE_ACTIVE, slots=8
            )
        )
    await stand_in.announce()
    running = await start_router()

    async def placeable() -> bool:
        answer = await running.view.ListReplicas(router_pb.ListReplicasRequest(), timeout=5)
        return any(each.placeable for each in answer.replicas)

    await eventually(placeable)
    return running


@pytest.mark.parametrize(
    ("content", "version", "reason"),
    [
        (EASY, "small@v1", "small: rules 0."),
        (HARD, "large@v1", "large: rules 0."),
        ("你好", "small@v1", "small: rules 0."),
        ("word " * 4000, "large@v1", "large: prompt of about 5001 tokens is over 2000"),
        ("", "large@v1", "large: default, there is no text to judge"),
    ],
)
async def test_what_is_asked_decides_and_can_be_explained(
    router: RunningRouter, content: str, version: str, reason: str
) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
    async with aiohttp.ClientSession() as http, http.post(router.url + CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        request_id = answer.headers["X-Request-Id"]
    why = await explain(router, request_id)
    assert (why.requested_model, why.model_version, why.via) == ("auto", version, "tier")
    assert why.tier_reason.startswith(reason)


async def test_grpc_callers_get_the_same(router: RunningRouter) -> None:
    for content, version in ((EASY, "small@v1"), (HARD, "large@v1")):
        request = inference.GenerateRequest(model="auto", text=content)
        metadata = [(md.REQUEST_ID, f"why-{version[:5]}")]
        call = router.inference.Generate(request, metadata=metadata, timeout=10)
        assert [part async for part in call]
        why = await explain(router, f"why-{version[:5]}")
        assert (why.model_version, why.via) == (version, "tier")


async def test_names_that_are_not_tiered_say_what_chose(router: RunningRouter) -> None:
    async with aiohttp.ClientSession() as http:
        for name, via in (("small", "sole"), ("large@v1", "pin")):
            body = {"model": name, "messages": [{"role": "user", "content": HARD}]}
            async with http.post(router.url + CHAT, json=body) as answer:
                assert answer.status == 200
                why = await explain(router, answer.headers["X-Request-Id"])
            assert (why.via, why.tier_reason) == (via, "")


async def explain(router: RunningRouter, request_id: str) -> Any:
    request = router_pb.ExplainRequestRequest(request_id=request_id)
    return await router.view.ExplainRequest(request, timeout=5)
