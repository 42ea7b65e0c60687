"""Which requests are copied, and how answers compare."""

from __future__ import annotations

from typing import Any

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_router.core.shadow import Answered, Shadow, compare, tokens_of


def test_a_share_of_the_requests_is_copied_the_same_on_every_router() -> None:
    ids = [f"req-{n:024x}" for n in range(10_000)]
    taken = {each for each in ids if Shadow("m@2", 0.05).takes(each)}
    # Five standard deviations of a fair draw.
    assert abs(len(taken) - 500) < 110
    assert taken <= {each for each in ids if Shadow("m@2", 0.2).takes(each)}
    assert all(Shadow("m@2", 1.0).takes(each) for each in ids)
    assert not any(Shadow("m@2", 0.0).takes(each) for each in ids)


def an_answer(outcome: str = "succeeded", **fields: Any) -> Answered:
    return Answered(outcome, 1.0, **fields)


@pytest.mark.parametrize(
    ("primary", "copy", "found"),
    [
        (an_answer(), an_answer(), {"outcome": True}),
        (an_answer(), an_answer("INTERNAL"), {"outcome": False}),
        (an_answer("INVALID_ARGUMENT"), an_answer("INVALID_ARGUMENT"), {"outcome": True}),
        (
            an_answer(completion_tokens=3, tokens={0: (1, 2, 3)}),
            an_answer(completion_tokens=3, tokens={0: (1, 2, 4)}),
            {"outcome": True, "completion_tokens": True, "tokens": False},
        ),
        (
            an_answer(completion_tokens=3, tokens={0: (1, 2, 3)}),
            an_answer(completion_tokens=2),
            {"outcome": True, "completion_tokens": False},
        ),
    ],
)
def test_answers_are_compared_in_what_both_tell(
    primary: Answered, copy: Answered, found: dict[str, bool]
) -> None:
    assert dict(compare(primary, copy)) == found


def test_tokens_are_those_of_all_messages_by_choice() -> None:
    called = [
        pb.CallOpenAIResponse(tokens=[pb.ChoiceTokens(index=0, token_ids=[1])]),
        pb.CallOpenAIResponse(body=b"data: [DONE]\n\n"),
        pb.CallOpenAIResponse(
            tokens=[
                pb.ChoiceTokens(index=1, token_ids=[9]),
                pb.ChoiceTokens(index=0, token_ids=[2]),
            ]
        ),
    ]
    encoded = [each.SerializeToString() for each in called]
    assert tokens_of(encoded, is_openai=True) == {0: (1, 2), 1: (9,)}
    generated = [pb.GenerateResponse(token_ids=[n]).SerializeToString() for n in (5, 6)]
    assert tokens_of(generated, is_openai=False) == {0: (5, 6)}
    for nothing in (None, [], [b"\xff\xff"], [pb.CallOpenAIResponse().SerializeToString()]):
        assert tokens_of(nothing, is_openai=True) is None
