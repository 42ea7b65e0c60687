"""One trace per request: a single chain across every hop, with times that add up."""

import asyncio
import secrets

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.inference.v1 import inference_service_pb2_grpc as rpc
from forebay_client.traces.core.span import Span
from forebay_common.channel import connect

from tests.mesh import Mesh, until

pytestmark = pytest.mark.integration
_REQUESTS = 200
_CHAIN = {
    "router": None,
    "place": "router",
    "queue": "router",
    "generate": "queue",
    "prefill": "generate",
    "decode": "generate",
}


async def _traced(mesh: Mesh, trace_ids: dict[str, str]) -> dict[str, list[Span]]:
    """The spans of each trace, once every chain is complete."""
    found: dict[str, list[Span]] = {}

    async def complete() -> bool:
        reader = mesh.reader()
        try:
            for trace_id in trace_ids:
                if len(found.get(trace_id, ())) < len(_CHAIN):
                    found[trace_id] = list(reader.spans(trace_id))
        finally:
            reader.close()
        return all(len(spans) >= len(_CHAIN) for spans in found.values())

    await until(complete, 20)
    return found


def _assert_one_chain(spans: list[Span], caller_span_id: str) -> None:
    named = {span.name: span for span in spans}
    assert sorted(span.name for span in spans) == sorted(_CHAIN)
    for name, parent in _CHAIN.items():
        expected = caller_span_id if parent is None else named[parent].span_id
        assert named[name].parent_id == expected, name


async def _ask(
    stub: rpc.InferenceServiceStub, trace_id: str, span_id: str, number: int
) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(
        model="sim", text=f"Question {number}?", sampling=pb.SamplingOptions(max_tokens=5)
    )
    metadata = (
        ("traceparent", f"00-{trace_id}-{span_id}-01"),
        ("x-request-id", f"q-{number}"),
    )
    return [part async for part in stub.Generate(request, metadata=metadata, timeout=60)]


async def test_two_hundred_requests_at_once_have_each_their_own_chain(mesh: Mesh) -> None:
    callers = {secrets.token_hex(16): secrets.token_hex(8) for _ in range(_REQUESTS)}
    async with connect(mesh.grpc) as channel:
        stub = rpc.InferenceServiceStub(channel)
        answers = await asyncio.gather(
            *(_ask(stub, *ids, number) for number, ids in enumerate(callers.items()))
        )
    for number, parts in enumerate(answers):
        assert parts[0].header.request_id == f"q-{number}"
    for trace_id, spans in (await _traced(mesh, callers)).items():
        _assert_one_chain(spans, callers[trace_id])
        request_ids = {
            span.attributes["forebay.request_id"]
            for span in spans
            if "forebay.request_id" in span.attributes
        }
        assert len(request_ids) == 1


async def test_the_times_of_one_streamed_request_add_up(mesh: Mesh) -> None:
    caller = {secrets.token_hex(16): secrets.token_hex(8)}
    async with connect(mesh.grpc) as channel:
        [ids] = caller.items()
        await _ask(rpc.InferenceServiceStub(channel), *ids, 0)
    [spans] = (await _traced(mesh, caller)).values()
    named = {span.name: span for span in spans}
    for name, span in named.items():
        assert span.end_unix_ns >= span.start_unix_ns, name
    router, generate = named["router"], named["generate"]
    prefill, decode = named["prefill"], named["decode"]
    assert router.start_unix_ns <= named["place"].start_unix_ns <= named["queue"].start_unix_ns
    assert named["queue"].end_unix_ns <= generate.start_unix_ns + 1_000_000
    assert generate.start_unix_ns <= prefill.start_unix_ns
    assert prefill.end_unix_ns == decode.start_unix_ns
    assert decode.end_unix_ns <= generate.end_unix_ns <= router.end_unix_ns
    # Four decode steps of 10 ms follow the first token, which may have been noted a little late.
    assert 32e6 <= decode.end_unix_ns - decode.start_unix_ns <= 400e6
    parts = sum(
        named[name].end_unix_ns - named[name].start_unix_ns
        for name in ("queue", "prefill", "decode")
    )
    assert parts <= router.end_unix_ns - router.start_unix_ns
