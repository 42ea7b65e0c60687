"""Reading a body in place gives what protobuf gives."""

import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_wire.core.messages import frame
from forebay_wire.core.openai_answer import bodies_of, body_of, first_of, sole_body
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

_TOKENS = st.lists(
    st.builds(
        pb.ChoiceTokens,
        index=st.integers(0, 2**32 - 1),
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    ),
    max_size=3,
)
_USAGE = st.none() | st.builds(pb.Usage, prompt_tokens=st.integers(0, 1000))
_SIZES = st.sampled_from((0, 1, 126, 127, 128, 129, 300, 16_382, 16_383, 16_384, 16_385, 70_000))


@given(
    content_type=st.text(max_size=20),
    body=st.builds(lambda size, text: b"x" * size + text, _SIZES, st.binary(max_size=3)),
    tokens=_TOKENS,
    usage=_USAGE,
    before=st.binary(max_size=9),
)
def test_a_body_is_found_wherever_it_stands(
    *,
    content_type: str,
    body: bytes,
    tokens: list[pb.ChoiceTokens],
    usage: pb.Usage | None,
    before: bytes,
) -> None:
    message = pb.CallOpenAIResponse(
        content_type=content_type, body=body, tokens=tokens, usage=usage
    ).SerializeToString()
    data = before + message + b"behind"
    assert body_of(data, len(before), len(before) + len(message)) == body
    found = first_of(data, len(before), len(before) + len(message))
    assert found == (content_type, body)
    framed = before + frame(message) + b"behind"
    end = len(framed) - len(b"behind")
    sole = sole_body(framed, len(before), end)
    assert sole == body or (sole is None and (content_type or len(message) < 3 or size_of(body)))
    for cut in range(len(before), end, max(1, len(message) // 20)):
        assert sole_body(framed, len(before), cut) is None


@given(
    bodies=st.lists(
        st.builds(lambda size, text: b"x" * size + text, _SIZES, st.binary(max_size=3)), max_size=6
    ),
    tokens=_TOKENS,
    cut=st.integers(0, 300_000),
)
def test_bodies_in_a_row_are_found_up_to_a_cut(
    bodies: list[bytes], tokens: list[pb.ChoiceTokens], cut: int
) -> None:
    messages = [
        frame(pb.CallOpenAIResponse(body=body, tokens=tokens).SerializeToString())
        for body in bodies
    ]
    data = b"before" + b"".join(messages)
    end = min(len(data), len(b"before") + cut)
    whole, expected, position = [], [], len(b"before")
    for body, message in zip(bodies, messages, strict=True):
        if position + len(message) > end:
            break
        position += len(message)
        whole.append(message)
        expected.append(body)
    found, rest = bodies_of(data, len(b"before"), end)
    assert found == [body for body in expected if body]
    assert rest == position


def size_of(body: bytes) -> bool:
    """Whether a body is one that is left to protobuf."""
    return not body or len(body) >= 1 << 14


def test_unusual_layouts_are_left_to_protobuf() -> None:
    twice = pb.CallOpenAIResponse(body=b"a").SerializeToString() * 2
    late = b"\x12\x01b\x0a\x01t"
    unknown = b"\x12\x01c\x7a\x01x"
    padded = b"\x12\x81\x00d"
    behind = b"\x12\x01e\x12\x01f"
    for message, body in (
        (twice, b"a"),
        (late, b"b"),
        (unknown, b"c"),
        (padded, b"d"),
        (behind, b"f"),
        (b"", b""),
    ):
        assert pb.CallOpenAIResponse.FromString(message).body == body
        assert body_of(message, 0, len(message)) == body
        assert sole_body(frame(message), 0, len(message) + 5) in (None, body)
        assert sole_body(frame(message, compressed=True), 0, len(message) + 5) is None
        assert sole_body(frame(message) * 2, 0, 2 * (len(message) + 5)) is None


@pytest.mark.parametrize(
    "message", [b"\x12\x05ab", b"\x12\x85", b"\x12", b"\xff\xff", b"\x12\xff\xff\xff"]
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(DecodeError):
        body_of(message + b"more behind it", 0, len(message))
