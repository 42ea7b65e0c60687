"""The request that goes on with an answer: made from what was delivered, or a reason why not."""

import json
import random
from collections.abc import Sequence

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_router.core.resume import (
    Unresumable,
    continue_generate,
    continue_openai,
    delivered_usage,
)

MOST = 1 << 20
HEADER = pb.AnswerHeader(
    request_id="r-1", model_version="sim@1", system_fingerprint="simulated-x", created_unix_s=7
)
USAGE = pb.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1)
GENERATE = pb.GenerateRequest(
    model="sim", text="Hello", sampling=pb.SamplingOptions(max_tokens=9, stop=["x"])
)
OPENAI = pb.CallOpenAIRequest(path="/v1/chat/completions", body=b'{"stream":true}')
PROGRESS = pb.Progress(model_version="sim@1", phase="weights", waited_ms=5)


def some_parts(count: int = 4) -> list[bytes]:
    """Messages of a Generate answer: the last token has not come yet."""
    return [
        pb.GenerateResponse(
            header=HEADER if index == 0 else None,
            text_delta=f"t{index} ",
            token_ids=[2 * index, 2 * index + 1],
        ).SerializeToString()
        for index in range(count)
    ]


def an_event(**fields: object) -> bytes:
    common = {"id": "chatcmpl-r-1", "object": "chat.completion.chunk", "created": 7, "model": "s@1"}
    return b"data: " + json.dumps({**common, **fields}).encode() + b"\n\n"


def some_frames(choices: Sequence[int] = (0, 1, 0, 1)) -> list[bytes]:
    """Messages of an OpenAI answer: a role each, then one token per frame."""
    opening = b"".join(an_event(choices=[{"index": i, "delta": {"role": "a"}}]) for i in (0, 1))
    return [
        pb.CallOpenAIResponse(
            content_type="text/event-stream; charset=utf-8" if number == 0 else "",
            body=(opening if number == 0 else b"") + an_event(choices=[{"index": index}]),
            tokens=[pb.ChoiceTokens(index=index, token_ids=[100 + number])],
        ).SerializeToString()
        for number, index in enumerate(choices)
    ]


def generate(message: pb.GenerateRequest, delivered: Sequence[bytes]) -> pb.GenerateRequest:
    made = continue_generate(message.SerializeToString(), delivered, most_bytes=MOST)
    assert isinstance(made, bytes), made
    return pb.GenerateRequest.FromString(made)


def openai(message: pb.CallOpenAIRequest, delivered: Sequence[bytes]) -> pb.CallOpenAIRequest:
    made = continue_openai(message.SerializeToString(), delivered, most_bytes=MOST)
    assert isinstance(made, bytes), made
    return pb.CallOpenAIRequest.FromString(made)


def test_a_continuation_is_the_request_with_what_was_delivered() -> None:
    made = generate(GENERATE, some_parts(3))
    assert made.resume == pb.ResumePoint(
        header=HEADER,
        text="t0 t1 t2 ",
        tokens=[pb.ChoiceTokens(token_ids=[0, 1, 2, 3, 4, 5])],
    )
    made.ClearField("resume")
    assert made == GENERATE


def test_an_openai_continuation_holds_the_events_and_each_choices_tokens() -> None:
    frames = some_frames()
    made = openai(OPENAI, frames)
    point = made.resume
    assert point.header == pb.AnswerHeader(request_id="chatcmpl-r-1", created_unix_s=7)
    assert point.events == b"".join(pb.CallOpenAIResponse.FromString(f).body for f in frames)
    assert {choice.index: list(choice.token_ids) for choice in point.tokens} == {
        0: [100, 102],
        1: [101, 103],
    }
    made.ClearField("resume")
    assert made == OPENAI


def test_an_answer_that_is_moved_again_and_again_has_the_point_of_one_move() -> None:
    rng = random.Random(4)
    for _ in range(50):
        parts, frames = some_parts(9), some_frames(rng.choices((0, 1), k=9))
        cuts = sorted(rng.sample(range(1, 9), 2))
        moved, called = GENERATE, OPENAI
        for start, end in zip([0, *cuts], [*cuts, 9], strict=True):
            moved = generate(moved, parts[start:end])
            called = openai(called, frames[start:end])
        assert moved == generate(GENERATE, parts)
        assert called == openai(OPENAI, frames)


def test_how_to_go_on_is_kept() -> None:
    asked = pb.GenerateRequest()
    asked.CopyFrom(GENERATE)
    asked.resume.mode = pb.RESUME_MODE_REPLAY
    assert generate(asked, some_parts()).resume.mode == pb.RESUME_MODE_REPLAY


def test_progress_is_no_part_of_the_answer() -> None:
    waited = pb.GenerateResponse(progress=PROGRESS).SerializeToString()
    called = pb.CallOpenAIResponse(progress=PROGRESS).SerializeToString()
    assert generate(GENERATE, [waited, *some_parts()]) == generate(GENERATE, some_parts())
    assert openai(OPENAI, [called, *some_frames()]) == openai(OPENAI, some_frames())
    # With nothing else the answer simply begins, with its header.
    assert generate(GENERATE, [waited]) == GENERATE
    assert openai(OPENAI, [called]) == OPENAI


def test_a_message_with_a_header_alone_is_resumed_without_it() -> None:
    made = generate(GENERATE, [pb.GenerateResponse(header=HEADER).SerializeToString()])
    assert made.resume.header == HEADER
    assert not made.resume.text


@pytest.mark.parametrize(
    "last",
    [
        pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, usage=USAGE),
        pb.GenerateResponse(usage=USAGE),
    ],
)
def test_an_answer_with_its_last_message_is_complete(last: pb.GenerateResponse) -> None:
    delivered = [*some_parts(), last.SerializeToString()]
    made = continue_generate(GENERATE.SerializeToString(), delivered, most_bytes=MOST)
    assert made is Unresumable.COMPLETE
    assert delivered_usage(delivered, is_openai=False) == USAGE


def test_an_openai_answer_with_its_last_message_is_complete_streamed_or_not() -> None:
    last = pb.CallOpenAIResponse(body=b"data: [DONE]\n\n", usage=USAGE).SerializeToString()
    whole = pb.CallOpenAIResponse(content_type="application/json", body=b"{}", usage=USAGE)
    for delivered in ([*some_frames(), last], [whole.SerializeToString()]):
        made = continue_openai(OPENAI.SerializeToString(), delivered, most_bytes=MOST)
        assert made is Unresumable.COMPLETE
        assert delivered_usage(delivered, is_openai=True) == USAGE


def test_what_cannot_be_resumed_has_a_reason() -> None:
    message, called = GENERATE.SerializeToString(), OPENAI.SerializeToString()
    text = pb.GenerateResponse(header=HEADER, text_delta="Hi").SerializeToString()
    part = pb.CallOpenAIResponse(content_type="application/json", body=b"{").SerializeToString()
    headless = pb.CallOpenAIResponse(content_type="text/event-stream", body=b"data: x\n\n")
    assert continue_generate(message, [text], most_bytes=MOST) is Unresumable.NO_TOKENS
    assert continue_generate(message, [b"\xff"], most_bytes=MOST) is Unresumable.UNREADABLE
    assert continue_generate(message, some_parts(), most_bytes=50) is Unresumable.TOO_LARGE
    assert continue_openai(called, [part], most_bytes=MOST) is Unresumable.NOT_STREAMED
    assert continue_openai(called, [b"\xff"], most_bytes=MOST) is Unresumable.UNREADABLE
    assert continue_openai(called, some_frames(), most_bytes=99) is Unresumable.TOO_LARGE
    headless_event = headless.SerializeToString()
    assert continue_openai(called, [headless_event], most_bytes=MOST) is Unresumable.UNREADABLE
