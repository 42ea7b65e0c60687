"""Where requests go, and what happens when replicas fail, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay_common import metadata as md
from forebay_common.discovery import Keys, to_json
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_common.store import Store

from .conftest import (
    MODEL,
    WAIT_S,
    RunningRouter,
    Script,
    StandIn,
    StartRouter,
    StartStandIn,
    a_refusal,
    eventually,
    put_catalogue,
)

pytestmark = pytest.mark.integration


def a_request(model: str = "chat") -> inference.GenerateRequest:
    return inference.GenerateRequest(model=model, text="hello")


async def generate(
    router: RunningRouter, request: inference.GenerateRequest | None = None, **options: Any
) -> str:
    options.setdefault("timeout", WAIT_S)
    call = router.inference.Generate(request or a_request(), **options)
    return "".join([part.text_delta async for part in call])


async def failure_of(call: Awaitable[Any]) -> ForebayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def replicas_of(router: RunningRouter) -> dict[str, str]:
    """Why each replica cannot be chosen; empty where it can."""
    response = await router.view.ListReplicas(router_pb.ListReplicasRequest(), timeout=WAIT_S)
    return {r.replica.replica_id: r.excluded_reason for r in response.replicas}


def sees(router: RunningRouter, **expected: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return await replicas_of(router) == expected

    return holds


def offers(
    router: RunningRouter, replica_id: str, model_version: str
) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        answer = await router.view.ListReplicas(router_pb.ListReplicasRequest(), timeout=WAIT_S)
        return (replica_id, model_version) in {
            (routed.replica.replica_id, model.model_version)
            for routed in answer.replicas
            for model in routed.replica.models
        }

    return holds


async def explanation(router: RunningRouter, request_id: str) -> router_pb.ExplainRequestResponse:
    request = router_pb.ExplainRequestRequest(request_id=request_id)
    response: router_pb.ExplainRequestResponse = await router.view.ExplainRequest(
        request, timeout=WAIT_S
    )
    return response


@pytest.fixture
async def pair(start_stand_in: StartStandIn, router: RunningRouter) -> tuple[StandIn, StandIn]:
    """Two replicas that the router sees; the second is too busy to be chosen first."""
    first, second = await start_stand_in("r1"), await start_stand_in("r2")
    await second.change(queued=50)

    async def settled() -> bool:
        listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
        queued = {r.replica.replica_id: r.replica.models[0].queued for r in listing.replicas}
        return queued == {"r1": 0, "r2": 50}

    await eventually(settled)
    return first, second


async def test_generate_and_embed_are_relayed(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    await start_stand_in()
    call = router.inference.Generate(a_request(), metadata=((md.REQUEST_ID, "mine"),))
    assert "".join([part.text_delta async for part in call]) == "t0 t1 t2 "
    trailing = dict(await call.trailing_metadata())
    assert trailing[md.USAGE] == "2,3,0"
    assert trailing[md.REPLICA] == "r1"
    assert trailing[md.REQUEST_ID] == "mine"
    embed = inference.EmbedRequest(model="chat", inputs=[inference.EmbedInput(text="x")])
    answer = await router.inference.Embed(embed, timeout=WAIT_S)
    assert list(answer.embeddings[0].values) == [1.0, 2.0]


@pytest.mark.parametrize(
    "script",
    [
        a_refusal(Reason.DRAINING),
        a_refusal(Reason.MODEL_NOT_LOADED),
        a_refusal(Reason.QUEUE_FULL),
        a_refusal(Reason.NO_REPLICA),
        a_refusal(Reason.REPLICA_LOST),
        a_refusal(Reason.INTERNAL),
        Script(tokens=0, dies=True),
    ],
    ids=["draining", "not-loaded", "full", "no-replica", "lost", "internal", "dies"],
)
async def test_what_fails_before_the_first_token_is_answered_elsewhere(
    router: RunningRouter, pair: tuple[StandIn, StandIn], script: Script
) -> None:
    first, second = pair
    first.scripts.append(script)
    assert await generate(router, metadata=((md.REQUEST_ID, "mine"),)) == "t0 t1 t2 "
    assert len(first.seen) == len(second.seen) == 1
    assert second.seen[0].metadata[md.ATTEMPT] == "2"
    assert second.seen[0].metadata[md.REQUEST_ID] == "mine"
    explained = await explanation(router, "mine")
    assert explained.outcome == "succeeded"
    assert [attempt.replica_id for attempt in explained.attempts] == ["r1", "r2"]
    reason = script.error.reason if script.error is not None else Reason.REPLICA_LOST
    assert explained.attempts[0].outcome == reason
    assert explained.attempts[1].outcome == "succeeded"
    assert explained.attempts[1].HasField("first_message_ms")
    excluded = {c.replica_id: c.excluded_reason for c in explained.attempts[1].candidates}
    assert excluded["r1"] in ("tried", "down", "model_not_active")


async def test_an_answer_that_has_begun_goes_on_elsewhere(
    router: RunningRouter, pair: tuple[StandIn, StandIn]
) -> None:
    first, second = pair
    first.scripts.append(Script(tokens=2, dies=True))
    call = router.inference.Generate(a_request(), timeout=WAIT_S)
    assert [part.text_delta async for part in call] == ["t0 ", "t1 ", "t2 "]
    [seen] = second.seen
    assert seen.request.resume.text == "t0 t1 "
    assert list(seen.request.resume.tokens[0].token_ids) == [0, 1]


@pytest.mark.parametrize(
    "reason", [Reason.INVALID_ARGUMENT, Reason.CONTEXT_LENGTH_EXCEEDED, Reason.UNSUPPORTED]
)
async def test_a_callers_mistake_is_not_tried_elsewhere_and_marks_nobody(
    router: RunningRouter, pair: tuple[StandIn, StandIn], reason: Reason
) -> None:
    first, second = pair
    first.scripts.append(a_refusal(reason, param="text"))
    error = await failure_of(generate(router))
    assert (error.reason, error.param) == (reason, "text")
    assert second.seen == []
    assert await replicas_of(router) == {"r1": "", "r2": ""}


async def test_attempts_are_bounded(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(max_attempts=2)
    stand_ins = [await start_stand_in(f"r{n}") for n in range(4)]
    for stand_in in stand_ins:
        stand_in.usual = a_refusal(Reason.INTERNAL)
    await eventually(sees(router, r0="", r1="", r2="", r3=""))
    assert (await failure_of(generate(router))).reason is Reason.INTERNAL
    assert sum(len(stand_in.seen) for stand_in in stand_ins) == 2


async def test_a_dead_replica_leaves_the_view_at_once_and_comes_back(
    router: RunningRouter, pair: tuple[StandIn, StandIn]
) -> None:
    first, _ = pair
    address = first.replica.address
    await first.kill()
    # It is still listed in etcd: the lost connection alone takes it out.
    assert await eventually(sees(router, r1="down", r2="")) < 1.0
    await first.start(address)
    await eventually(sees(router, r1="", r2=""))


async def test_a_dead_runner_leaves_the_view_at_once(
    router: RunningRouter, pair: tuple[StandIn, StandIn]
) -> None:
    first, second = pair
    await first.change(state=engine.MODEL_STATE_FAILED)
    assert await eventually(sees(router, r1="model_not_active", r2="")) < 1.0
    await generate(router)
    assert len(second.seen) == 1


async def test_draining_and_standby_replicas_get_nothing(
    router: RunningRouter, pair: tuple[StandIn, StandIn]
) -> None:
    first, second = pair
    await first.change(draining=True)
    await second.change(role=batcher.ROLE_STANDBY)
    await eventually(sees(router, r1="draining", r2="standby"))
    assert (await failure_of(generate(router))).reason is Reason.NO_REPLICA
    await second.change(role=batcher.ROLE_ACTIVE)
    assert await generate(router) == "t0 t1 t2 "
    assert (first.seen, len(second.seen)) == ([], 1)


async def test_a_lost_lease_does_not_remove_a_replica_that_still_speaks(
    router: RunningRouter, pair: tuple[StandIn, StandIn], start_stand_in: StartStandIn
) -> None:
    first, second = pair
    await first.withdraw()
    await second.withdraw()
    # A later change of the listing shows that the router has seen the withdrawals.
    third = await start_stand_in("r3")
    await eventually(sees(router, r1="", r2="", r3=""))
    await third.kill()
    await first.kill()
    await eventually(sees(router, r2="", r3="down"))


async def test_a_replica_that_does_not_speak_leaves_with_its_lease(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(unlisted_grace_s=0.05)
    stand_in = await start_stand_in()
    await eventually(sees(router, r1=""))
    await stand_in.withdraw()
    await eventually(sees(router))


async def test_a_request_waits_for_a_replica_to_appear(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(no_replica_wait_s=WAIT_S)
    request = asyncio.create_task(generate(router))
    stand_in = await start_stand_in(announced=False)
    await stand_in.change(state=engine.MODEL_STATE_LOADING)
    await stand_in.announce()
    await eventually(sees(router, r1="model_not_active"))
    assert not request.done()
    started = time.monotonic()
    await stand_in.change(state=engine.MODEL_STATE_ACTIVE)
    assert await request == "t0 t1 t2 "
    assert time.monotonic() - started < 1.0


async def test_a_waiting_request_keeps_its_deadline(
    start_router: StartRouter, catalogue: None
) -> None:
    router = await start_router(no_replica_wait_s=WAIT_S)
    error = await failure_of(generate(router, timeout=0.2))
    assert error.reason is Reason.DEADLINE_EXCEEDED


async def test_no_replica_is_unavailable_and_an_unknown_model_is_not_found(
    router: RunningRouter,
) -> None:
    error = await failure_of(generate(router))
    assert error.reason is Reason.NO_REPLICA
    assert error.retry_after_s == 1
    for name in ("nope", "chat@v9", "nope@v1"):
        error = await failure_of(generate(router, a_request(name)))
        assert (error.reason, error.param) == (Reason.MODEL_NOT_FOUND, "model")


async def test_before_the_catalogue_was_read_no_model_is_unknown(start_router: StartRouter) -> None:
    router = await start_router(etcd="127.0.0.1:1", no_replica_wait_s=0.1)
    assert (await failure_of(generate(router))).reason is Reason.STORE_UNAVAILABLE


async def test_names_lead_to_versions(
    router: RunningRouter, start_stand_in: StartStandIn, store: Store, keys: Keys
) -> None:
    one, two = await start_stand_in("one"), await start_stand_in("two")
    await two.change(model_version="chat@v2")
    await eventually(sees(router, one="", two=""))
    await eventually(offers(router, "two", "chat@v2"))
    for name in ("chat", "default", "chat@v1"):
        await generate(router, a_request(name))
    assert len(one.seen) == 3
    await generate(router, a_request("chat@v2"))
    assert two.seen[-1].metadata[md.MODEL] == "chat@v2"

    model = registry.Model(
        name="chat",
        versions=[registry.ModelVersion(version=version) for version in ("v1", "v2")],
        split=[registry.SplitEntry(version="v2", weight=1)],
    )
    await store.put(keys.model("chat"), to_json(model))

    async def shifted() -> bool:
        await generate(router)
        return len(two.seen) == 2

    await eventually(shifted)


async def test_a_session_keeps_its_version(
    router: RunningRouter, start_stand_in: StartStandIn, store: Store, keys: Keys
) -> None:
    one, two = await start_stand_in("one"), await start_stand_in("two")
    await two.change(model_version="chat@v2")
    model = registry.Model(
        name="chat",
        versions=[registry.ModelVersion(version=version) for version in ("v1", "v2")],
        split=[registry.SplitEntry(version=version, weight=50) for version in ("v1", "v2")],
    )
    await store.put(keys.model("chat"), to_json(model))

    async def split() -> bool:
        await generate(router)
        return bool(one.seen and two.seen)

    await eventually(split)
    before = len(one.seen), len(two.seen)
    for _ in range(8):
        await generate(router, metadata=((md.SESSION, "mine"),))
    gained = len(one.seen) - before[0], len(two.seen) - before[1]
    assert sorted(gained) == [0, 8]


async def test_a_burst_is_spread_over_equal_replicas(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_ins = [await start_stand_in(f"r{n}") for n in range(4)]
    for stand_in in stand_ins:
        stand_in.usual = Script(tokens=0, hangs=True)
    await eventually(sees(router, r0="", r1="", r2="", r3=""))
    calls = [router.inference.Generate(a_request(), timeout=WAIT_S) for _ in range(16)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    await asyncio.gather(*(stand_in.arrival(4) for stand_in in stand_ins))
    listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
    assert [replica.in_flight for replica in listing.replicas] == [4, 4, 4, 4]
    for call in calls:
        call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


async def test_what_other_routers_send_counts_too(
    router: RunningRouter, pair: tuple[StandIn, StandIn]
) -> None:
    first, second = pair
    await first.change(in_flight=60)

    async def reported() -> bool:
        listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
        return any(r.replica.models[0].in_flight == 60 for r in listing.replicas)

    await eventually(reported)
    await generate(router)
    assert (len(first.seen), len(second.seen)) == (0, 1)


async def test_a_full_router_refuses(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(max_in_flight=1)
    stand_in = await start_stand_in()
    stand_in.usual = Script(tokens=1, hangs=True)
    held = router.inference.Generate(a_request())
    await held.read()
    error = await failure_of(generate(router))
    assert error.reason is Reason.QUEUE_FULL
    held.cancel()
    await (await stand_in.arrival()).ended.wait()
    stand_in.usual = Script()

    async def let_in() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await generate(router) == "t0 t1 t2 "
        return False

    await eventually(let_in)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_caller_that_cancels_stops_the_replica(
    router: RunningRouter, start_stand_in: StartStandIn, tokens: int
) -> None:
    stand_in = await start_stand_in()
    stand_in.usual = Script(tokens=tokens, hangs=True)
    call = router.inference.Generate(a_request(), metadata=((md.REQUEST_ID, "mine"),))
    reading = asyncio.ensure_future(call.read())
    seen = await stand_in.arrival()
    if tokens:
        await reading
    left_at = time.monotonic()
    call.cancel()
    async with asyncio.timeout(WAIT_S):
        await seen.ended.wait()
    assert seen.cancelled_at is not None
    assert seen.cancelled_at - left_at < 0.25

    async def recorded() -> bool:
        return (await explanation(router, "mine")).outcome == "cancelled"

    await eventually(recorded)
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_deadline_is_never_longer_than_allowed(
    start_router: StartRouter, catalogue: None, start_stand_in: StartStandIn
) -> None:
    router = await start_router(default_timeout_s=40.0, max_timeout_s=50.0)
    stand_in = await start_stand_in()
    await eventually(sees(router, r1=""))
    for timeout, granted in ((None, 40), (1000, 50), (10, 10)):
        await generate(router, timeout=timeout)
        remaining_s = stand_in.seen[-1].remaining_s
        assert remaining_s is not None
        # gRPC sends a deadline rounded up by at most some percent.
        assert granted - 2 < remaining_s < granted * 1.05


async def test_a_malformed_message_disturbs_nobody(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_in = await start_stand_in()
    raw: Any = router.channel.unary_stream("/forebay.inference.v1.InferenceService/Generate")

    async def send_garbage() -> None:
        async for _ in raw(b"\xff\xff\xff", timeout=WAIT_S):
            pass

    garbage = asyncio.create_task(failure_of(send_garbage()))
    answers = await asyncio.gather(*(generate(router) for _ in range(8)))
    assert (await garbage).reason is Reason.INVALID_ARGUMENT
    assert set(answers) == {"t0 t1 t2 "}
    assert len(stand_in.seen) == 8


async def test_a_wrong_class_is_refused_and_the_usual_one_is_realtime(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_in = await start_stand_in()
    await generate(router)
    assert stand_in.seen[0].metadata[md.CLASS] == "REALTIME"
    error = await failure_of(generate(router, metadata=((md.CLASS, "URGENT"),)))
    assert (error.reason, error.param) == (Reason.INVALID_ARGUMENT, md.CLASS)


async def test_etcd_away_harms_no_request(
    etcd_process: Callable[[], Any], start_router: StartRouter, keys: Keys
) -> None:
    etcd = etcd_process()
    async with Store.open([etcd.endpoint]) as store:
        await put_catalogue(store, keys)
        stand_ins = [StandIn(f"r{n}", store, keys) for n in range(2)]  # type: ignore[abstract]
        for stand_in in stand_ins:
            await stand_in.start()
        router = await start_router(etcd=etcd.endpoint)
        await eventually(sees(router, r0="", r1=""))
        etcd.stop()
        answers = await asyncio.gather(*(generate(router) for _ in range(50)))
        # A replica's death is seen without etcd as well.
        await stand_ins[0].kill()
        answers += await asyncio.gather(*(generate(router) for _ in range(50)))
        assert Counter(answers) == {"t0 t1 t2 ": 100}
        listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
        age_ms = listing.age_ms
        etcd.start()

        async def heard() -> bool:
            listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
            return bool(listing.age_ms < age_ms or listing.age_ms < 500)

        await eventually(heard, within_s=10)
        assert await generate(router) == "t0 t1 t2 "
        await stand_ins[1].kill()


async def test_routes_show_the_catalogue(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    await failure_of(generate(router, a_request("nope")))
    routes = await router.view.ListRoutes(router_pb.ListRoutesRequest(), timeout=WAIT_S)
    assert [model.name for model in routes.catalogue.models] == ["chat"]
    assert [alias.target for alias in routes.catalogue.aliases] == ["chat"]
    assert routes.age_ms < 10_000


async def test_an_unknown_request_cannot_be_explained(router: RunningRouter) -> None:
    error = await failure_of(explanation(router, "never"))
    assert error.reason is Reason.REQUEST_NOT_FOUND


async def test_a_refused_request_is_explained_too(router: RunningRouter) -> None:
    await failure_of(generate(router, a_request("nope"), metadata=((md.REQUEST_ID, "mine"),)))
    explained = await explanation(router, "mine")
    assert explained.requested_model == "nope"
    assert explained.outcome == Reason.MODEL_NOT_FOUND
    assert not explained.attempts


async def test_the_version_is_named_to_the_replica(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    stand_in = await start_stand_in()
    await generate(router, a_request("ignored"), metadata=((md.MODEL, "default"),))
    assert stand_in.seen[0].metadata[md.MODEL] == MODEL


async def test_after_a_storm_every_request_has_ended_once(
    router: RunningRouter, start_stand_in: StartStandIn
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stand_ins = [await start_stand_in(f"r{n}") for n in range(3)]
    await eventually(sees(router, r0="", r1="", r2=""))
    failures = (Reason.REPLICA_LOST, Reason.INTERNAL, Reason.QUEUE_FULL, Reason.UNSUPPORTED)
    for stand_in in stand_ins:
        for _ in range(40):
            script = a_refusal(rng.choice(failures), tokens=rng.randrange(3))
            stand_in.scripts.append(rng.choice((Script(), Script(hangs=True), script)))
    requests = 60

    async def ask(n: int) -> None:
        metadata = ((md.REQUEST_ID, f"request-{n}"),)
        call = router.inference.Generate(a_request(), metadata=metadata, timeout=0.3)
        try:
            for _ in range(rng.randrange(1, 5)):
                await call.read()
        except grpc.aio.AioRpcError:
            return
        call.cancel()

    await asyncio.gather(*(ask(n) for n in range(requests)))

    async def settled() -> bool:
        listing = await router.view.ListReplicas(router_pb.ListReplicasRequest())
        return all(replica.in_flight == 0 for replica in listing.replicas)

    await eventually(settled)
    for n in range(requests):
        assert (await explanation(router, f"request-{n}")).outcome
    async with (
        aiohttp.ClientSession(router.url) as http,
        http.get("/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    ended = sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("forebay_router_requests_total{")
    )
    assert ended == requests
    assert "forebay_router_in_flight 0.0" in lines
