"""No token is lost and none comes twice when a replica dies in the middle of its streams."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_common import metadata as md
from forebay_common.channel import connect

from tests.mesh import Mesh, ask, running, simulated, until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 140
CUTS = (0, 1, 5, 63, 127)
WAVE = 20
WAVES_PER_CUT = 2
REPLICAS = ("r1", "r2", "r3")
SILENCE_S = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, etcd: str) -> AsyncIterator[Mesh]:
    """Three replicas of a paced model, behind a router that soon gives silent ones up."""
    spec = simulated()
    directory = tmp_path_factory.mktemp("fleet")
    router = {
        "FOREBAY_ROUTER_SILENCE_TIMEOUT_S": str(SILENCE_S),
        # Who was killed is tried again soon, so that the next wave has three replicas.
        "FOREBAY_ROUTER_BREAKER_OPEN_S": "0.2",
        "FOREBAY_ROUTER_BREAKER_OPEN_MAX_S": "1",
    }
    async with running(directory, etcd, f"/resume-{os.getpid()}", spec, router=router) as mesh:
        for replica_id in REPLICAS:
            mesh.add_replica(replica_id, spec)
        await mesh.placeable(*REPLICAS)
        yield mesh


@dataclasses.dataclass
class Seen:
    """What a client has of one stream."""

    heads: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    tokens: list[int] = dataclasses.field(default_factory=list)
    ends: list[Any] = dataclasses.field(default_factory=list)
    usages: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    error: str = ""

    def answer(self) -> tuple[Any, ...]:
        """What has to be the same in every run."""
        return (len(self.heads), self.texts, self.tokens, self.ends, self.usages, self.error)

    def gap_s(self) -> float:
        """The longest time without a token, after the first."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0)


class Client:
    """Asks in all four ways and follows the streams."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.longest = 0
        self._seen: dict[int, Seen] = {}
        self.grown = asyncio.Event()

    async def __aenter__(self) -> "Client":
        self._channel = connect(self._mesh.grpc)
        self._stub = rpc.InferenceServiceStub(self._channel)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._http.close()
        await self._channel.close()

    def ask(self, numbers: Iterable[int]) -> list[asyncio.Task[Seen]]:
        """Begin a stream for each number: it says what is asked and how."""
        self.longest = 0
        self._seen = {number: Seen() for number in numbers}
        return [asyncio.create_task(self._follow(*each)) for each in self._seen.items()]

    async def heal(self) -> None:
        """Wait until every replica is used again: a little traffic proves them."""

        async def healed() -> bool:
            await asyncio.gather(*(ask(self._stub, text=f"Still there, {n}?") for n in range(6)))
            seen = await self._mesh.view()
            return {name for name, routed in seen.items() if routed.placeable} == set(REPLICAS)

        await until(healed, 60)

    async def until_token(self, count: int, *, of_all: bool = False) -> None:
        """Wait until the stream that is furthest, or each of them, has so many tokens."""
        async with asyncio.timeout(30):
            while self.longest < count or (
                of_all and any(len(seen.times_s) < count for seen in self._seen.values())
            ):
                self.grown.clear()
                await self.grown.wait()

    async def _follow(self, number: int, seen: Seen) -> Seen:
        try:
            await (self._generate if number % 2 else self._call)(number, seen)
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
        return seen

    def _grow(self, seen: Seen) -> None:
        seen.times_s.append(time.monotonic())
        self.longest = max(self.longest, len(seen.times_s))
        self.grown.set()

    async def _generate(self, number: int, seen: Seen) -> None:
        sampling = pb.SamplingOptions(max_tokens=TOKENS, ignore_eos=True)
        if number % 4 == 1:
            sampling.seed = number
            sampling.temperature = 1.0
        text = f"Tell me of river {number} é"
        request = pb.GenerateRequest(model="sim", text=text, sampling=sampling)
        call = self._stub.Generate(request, timeout=60)
        async for part in call:
            if part.HasField("header"):
                seen.heads.add((part.header.request_id, part.header.created_unix_s))
            seen.texts[0] = seen.texts.get(0, "") + part.text_delta
            seen.tokens += part.token_ids
            if part.finish_reason:
                seen.ends.append(part.finish_reason)
                seen.usages.append((part.usage.prompt_tokens, part.usage.completion_tokens))
            self._grow(seen)
        trailing = dict(await call.trailing_metadata())
        prompt, completion, _ = trailing[md.USAGE].split(",")
        assert [(int(prompt), int(completion))] == seen.usages

    async def _call(self, number: int, seen: Seen) -> None:
        body: dict[str, Any] = {
            "model": "sim",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        if number % 4:
            path = "/v1/completions"
            body |= {"prompt": f"Tell me of lake {number}", "n": 2, "seed": number}
        else:
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": f"Tell me of lake {number}"}]}
        url = f"http://{self._mesh.http}{path}"
        async with self._http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    self._take_in(line.removeprefix(b"data: ").strip(), seen)

    def _take_in(self, data: bytes, seen: Seen) -> None:
        if data == b"[DONE]":
            seen.ends.append("done")
            return
        event = json.loads(data)
        if "error" in event:
            seen.error = str(event["error"])
            return
        seen.heads.add(tuple(event[k] for k in ("id", "created", "model", "system_fingerprint")))
        if event["usage"]:
            usage = event["usage"]
            seen.usages.append((usage["prompt_tokens"], usage["completion_tokens"]))
        for choice in event["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            seen.texts[choice["index"]] = seen.texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                seen.ends.append((choice["index"], choice["finish_reason"]))
            if text:
                self._grow(seen)


async def uninterrupted(client: Client, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
    """The answers that nothing disturbs."""
    whole = await asyncio.gather(*client.ask(numbers))
    assert [seen.error for seen in whole] == [""] * len(numbers)
    return [seen.answer() for seen in whole]


async def resumed(mesh: Mesh) -> float:
    """How many streams the router has moved."""
    url = f"http://{mesh.http}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        page = await answer.text()
    wanted = 'forebay_router_resumes_total{result="resumed"}'
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(wanted))


async def busiest(mesh: Mesh) -> str:
    """The replica that lives and holds most requests, as soon as one holds any."""
    found: list[str] = []

    async def holds() -> bool:
        view = await mesh.view()
        held = {name: routed.in_flight for name, routed in view.items() if routed.placeable}
        found[:] = [max(held, key=lambda name: held[name], default="")]
        if not held.get(found[0], 0):
            return False
        return (await mesh.engine_status(found[0])).runner_pid > 0

    await until(holds, 10)
    return found[0]


async def signal_runner(mesh: Mesh, name: str, what: signal.Signals) -> int:
    """Send a signal to a replica's runner, which is there; returns its process id."""
    pid = (await mesh.engine_status(name)).runner_pid
    # The pid 0 would be this process and its group.
    assert pid > 0
    os.kill(pid, what)
    return pid


@pytest.mark.timeout(300)
async def test_killed_runners_cost_no_stream_a_token(fleet: Mesh) -> None:
    """200 streams, ten runners killed while they are at these tokens."""
    gaps_s: list[float] = []
    async with Client(fleet) as client:
        wave = 0
        for cut in CUTS:
            for _ in range(WAVES_PER_CUT):
                # Each asks for something else: what ends two runners is not tried a third time.
                numbers = range(wave * WAVE, (wave + 1) * WAVE)
                wave += 1
                wanted = await uninterrupted(client, numbers)
                if cut:
                    streams = client.ask(numbers)
                    victim = await busiest(fleet)
                    await client.until_token(cut)
                else:
                    # Stopped first, so that it is killed before it says anything.
                    victim = REPLICAS[wave % len(REPLICAS)]
                    await signal_runner(fleet, victim, signal.SIGSTOP)
                    streams = client.ask(numbers)
                    await until(lambda name=victim: _holds(fleet, name), 10)
                await signal_runner(fleet, victim, signal.SIGKILL)
                answers = await asyncio.gather(*streams)
                for number, seen, answer in zip(numbers, answers, wanted, strict=True):
                    assert seen.answer() == answer, f"stream {number}, cut at {cut}"
                gaps_s += [seen.gap_s() for seen in answers]
                await client.heal()
    moved = await resumed(fleet)
    assert moved >= 4 * WAVES_PER_CUT
    p99_s = statistics.quantiles(gaps_s, n=100)[98]
    print(f"{len(gaps_s)} streams, {moved:.0f} moved; longest gap p99 {p99_s:.2f} s")
    # 2 s are what is wanted; the rest is for machines that have other things to do.
    assert p99_s < 5


@pytest.mark.timeout(120)
async def test_a_frozen_runners_streams_move_and_nothing_is_doubled_when_it_wakes(
    fleet: Mesh,
) -> None:
    numbers = range(WAVE)
    async with Client(fleet) as client:
        wanted = await uninterrupted(client, numbers)
        before = await resumed(fleet)
        streams = client.ask(numbers)
        victim = await busiest(fleet)
        await client.until_token(20)
        frozen = await signal_runner(fleet, victim, signal.SIGSTOP)
        try:

            async def moved() -> bool:
                return await resumed(fleet) > before

            noticed_s = await until(moved, 30)
        finally:
            # Awake while its streams go on elsewhere: what it says now is late.
            # Unless its host has given it up by now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        answers = await asyncio.gather(*streams)
        assert [seen.answer() for seen in answers] == wanted
        print(f"noticed after {noticed_s:.2f} s")
        assert noticed_s < SILENCE_S + 5
        await client.heal()
        assert await uninterrupted(client, numbers) == wanted


@pytest.mark.timeout(120)
async def test_killed_batchers_cost_no_stream_a_token(fleet: Mesh) -> None:
    numbers = range(WAVE)
    async with Client(fleet) as client:
        wanted = await uninterrupted(client, numbers)
        before = await resumed(fleet)
        for cut in (1, 63):
            streams = client.ask(numbers)
            victim = await busiest(fleet)
            await client.until_token(cut)
            fleet.replicas[victim].batcher.kill()
            answers = await asyncio.gather(*streams)
            assert [seen.answer() for seen in answers] == wanted
            fleet.replicas[victim].batcher.wait()
            fleet.replicas[victim].batcher = fleet.add_batcher(victim)
            await client.heal()
        assert await resumed(fleet) > before


@pytest.mark.timeout(120)
async def test_a_stream_survives_one_replica_after_another(fleet: Mesh) -> None:
    numbers = range(8)
    async with Client(fleet) as client:
        wanted = await uninterrupted(client, numbers)
        streams = client.ask(numbers)
        for cut in (10, 40, 70):
            # All of them: who waits for a first token when two runners die is taken for the cause.
            await client.until_token(cut, of_all=True)
            victim = await busiest(fleet)
            await signal_runner(fleet, victim, signal.SIGKILL)
        answers = await asyncio.gather(*streams)
        assert [seen.answer() for seen in answers] == wanted
        await client.heal()


async def _holds(mesh: Mesh, name: str) -> bool:
    return (await mesh.view())[name].in_flight > 0
