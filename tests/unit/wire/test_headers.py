"""Header blocks mean what hpack says, or are an error; gRPC's fields survive the way."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from forebay_wire.core.headers import (
    NO_TABLE,
    RESPONSE_BLOCK,
    Field,
    HeaderDecoder,
    HeaderError,
    Headers,
    MalformedError,
    TimeoutFormatError,
    check_request,
    check_response,
    check_trailers,
    encode,
    metadata_block,
    parse_timeout,
    parse_trailers,
    percent_decode,
    percent_encode,
    request_block,
    size_of,
    timeout_field,
    trailers_block,
)
from hpack import Decoder, Encoder, HPACKError
from hpack.table import HeaderTable
from hypothesis import example, given
from hypothesis import strategies as st

LIMIT = 16 << 10

octets = st.binary(max_size=40) | st.integers(100, 600).map(lambda size: b"x" * size)
fields = st.sampled_from(HeaderTable.STATIC_TABLE) | st.tuples(
    st.sampled_from([name for name, _ in HeaderTable.STATIC_TABLE]) | octets, octets
)
lists = st.lists(fields, max_size=12)

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/forebay.inference.v1.InferenceService/Generate"),
    (b":authority", b"localhost:50051"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"user-agent", b"grpc-c/1.0"),
    (b"grpc-accept-encoding", b"identity, gzip"),
    (b"grpc-encoding", b"gzip"),
    (b"grpc-timeout", b"1500m"),
    (b"x-request-id", b"r-1"),
]


def a_decoder(*, limit: int = LIMIT) -> HeaderDecoder:
    """As it is once the peer has confirmed a table of size 0."""
    decoder = HeaderDecoder(limit)
    decoder.forbid_table()
    assert decoder.decode(NO_TABLE) == []
    return decoder


def plain(headers: Headers) -> Headers:
    return [(bytes(name), bytes(value)) for name, value in headers]


def with_field(name: bytes, value: bytes) -> Headers:
    return [*REQUEST, (name, value)]


# --- Reading blocks


@given(st.lists(lists, max_size=5), st.integers(0, 5), st.booleans(), st.booleans())
def test_what_hpack_writes_is_read_before_and_after_the_table_is_gone(
    blocks: list[Headers], confirmed_at: int, huffman: bool, sensitive: bool
) -> None:
    encoder, decoder = Encoder(), HeaderDecoder(LIMIT)
    for at, headers in enumerate(blocks):
        if at == confirmed_at:
            encoder.header_table_size = 0
            decoder.forbid_table()
        block = encoder.encode([(*field, sensitive) for field in headers], huffman=huffman)
        assert decoder.decode(block) == headers


@given(lists)
def test_what_is_written_means_the_same_to_hpack_and_to_us(headers: Headers) -> None:
    block = encode(headers)
    assert [tuple(field) for field in Decoder().decode(block, raw=True)] == headers
    decoder = a_decoder()
    assert decoder.decode(block) == headers
    assert decoder.decode(NO_TABLE + block) == headers


@given(lists)
def test_writing_touches_no_table(headers: Headers) -> None:
    decoder = Decoder()
    decoder.decode(encode(headers), raw=True)
    assert not decoder.header_table.dynamic_entries


def mutated(block: bytes, at: int, octet: int, cut: int) -> bytes:
    changed = bytearray(block)
    if changed:
        changed[at % len(changed)] = octet
    return bytes(changed[: len(changed) - cut])


hostile = st.binary(max_size=80) | st.builds(
    mutated,
    st.builds(
        lambda headers, huffman: Encoder().encode(headers, huffman=huffman), lists, st.booleans()
    ),
    st.integers(0, 5000),
    st.integers(0, 255),
    st.integers(0, 3),
)


@given(hostile)
@example(b"\x80")
@example(b"\xbe")
@example(b"\xff\x00")
@example(b"\x7f\x00\x00")
@example(b"\x0f\x80\x80\x80\x80\x00\x00")
@example(b"\x0f\x80\x80\x80\x80\x80\x00\x00")
@example(b"\x00\x7f\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"\x00\x81\xff\x00")
@example(b"\x82\x20")
@example(b"\x20\x20\x82")
@example(b"\x21")
@example(b"\x3f\xe1\x1f")
@example(b"\x40")
@example(b"\x00\x05ab")
@example(b"\x04\x82\xff\xff")
def test_any_octets_mean_what_hpack_says_or_are_an_error(block: bytes) -> None:
    reference = Decoder(max_header_list_size=LIMIT)
    reference.header_table_size = reference.max_allowed_table_size = 0
    try:
        # A peer's "with indexing" leaves nothing in a table of size 0.
        expected = plain([(name, value) for name, value in reference.decode(block, raw=True)])
    except HPACKError:
        with pytest.raises(HeaderError):
            a_decoder().decode(block)
    else:
        assert a_decoder().decode(block) == expected


@given(st.lists(hostile, max_size=4), st.booleans())
def test_any_octets_before_the_table_is_gone_raise_nothing_else(
    blocks: list[bytes], confirmed: bool
) -> None:
    decoder = HeaderDecoder(LIMIT)
    if confirmed:
        decoder.forbid_table()
    try:
        for block in blocks:
            decoder.decode(block)
    except HeaderError as error:
        assert error.__cause__ is None


def test_a_peer_that_does_not_shrink_its_table_after_it_agreed_to_is_refused() -> None:
    decoder = HeaderDecoder(LIMIT)
    decoder.decode(b"\x82")
    decoder.forbid_table()
    with pytest.raises(HeaderError):
        decoder.decode(b"\x82")


def test_a_table_may_be_used_until_the_peer_agreed() -> None:
    encoder, decoder = Encoder(), HeaderDecoder(LIMIT)
    encoder.header_table_size = 0
    assert decoder.decode(encoder.encode([(b"a", b"b")])) == [(b"a", b"b")]
    encoder.header_table_size = 4096
    for _ in range(2):
        assert decoder.decode(encoder.encode([(b"a", b"b")])) == [(b"a", b"b")]


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("size", [10, 2000])
def test_a_list_is_bounded_by_its_decoded_size(size: int, confirmed: bool) -> None:
    headers: Headers = [(b"name", b"v" * size)] * 3
    exact = size_of(headers)
    assert exact == 3 * (4 + size + 32)
    for limit, fits in ((exact, True), (exact - 1, False)):
        decoder = a_decoder(limit=limit) if confirmed else HeaderDecoder(limit)
        if fits:
            assert decoder.decode(encode(headers)) == headers
        else:
            with pytest.raises(HeaderError):
                decoder.decode(encode(headers))


def test_a_bomb_of_table_references_is_bounded() -> None:
    encoder = Encoder()
    bomb = encoder.encode([(b"a", b"b" * 4000)]) + b"\xbe" * 100_000
    tracemalloc.start()
    with pytest.raises(HeaderError):
        HeaderDecoder(LIMIT).decode(bomb)
    with pytest.raises(HeaderError):
        a_decoder().decode(b"\x90" * 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("size", [3, 600])
def test_a_decoded_list_is_the_callers_own(size: int) -> None:
    decoder, block = a_decoder(), encode([(b"a", b"b" * size)])
    decoder.decode(block).clear()
    assert decoder.decode(block) == [(b"a", b"b" * size)]


def test_credentials_are_never_to_be_indexed() -> None:
    block = encode([(b"authorization", b"secret"), (b"x-other", b"open")])
    assert [field.indexable for field in Decoder().decode(block, raw=True)] == [False, True]


def test_an_error_never_repeats_the_peers_octets() -> None:
    for decoder in (HeaderDecoder(LIMIT), a_decoder()):
        with pytest.raises(HeaderError) as caught:
            decoder.decode(b"\x00\x06secret\x7f")
        assert "secret" not in str(caught.value)
        assert caught.value.__suppress_context__


# --- Rules of messages


def test_a_request_is_sorted_into_what_grpc_means() -> None:
    request = check_request(REQUEST)
    assert (request.method, request.scheme) == ("POST", "http")
    assert request.path == "/forebay.inference.v1.InferenceService/Generate"
    assert request.authority == "localhost:50051"
    assert request.content_type == "application/grpc"
    assert request.encoding == "gzip"
    assert request.accept_encoding == "identity, gzip"
    assert request.timeout_s == 1.5
    assert request.content_length is None
    assert request.fields == {"user-agent": "grpc-c/1.0", "x-request-id": "r-1"}


def test_a_request_without_the_optional_fields_is_sound() -> None:
    request = check_request(REQUEST[:3])
    assert (request.authority, request.content_type, request.encoding) == ("", "", "")
    assert request.timeout_s is None
    assert request.fields == {}
    assert check_request([*REQUEST[:3], (b"host", b"h")]).authority == "h"


@pytest.mark.parametrize(
    "field",
    [
        (b"Upper", b"x"),
        (b"", b"x"),
        (b"a b", b"x"),
        (b"a:b", b"x"),
        (b"a\0", b"x"),
        (b"a\x7f", b"x"),
        (b"caf\xc3\xa9", b"x"),
        (b"connection", b"close"),
        (b"proxy-connection", b"x"),
        (b"keep-alive", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"te", b"gzip"),
        (b"te", b"trailers, gzip"),
        (b":path", b"/late"),
        (b":status", b"200"),
        (b":protocol", b"websocket"),
        (b":", b"x"),
        (b"x", b"a\0b"),
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"\r"),
        (b"x", b" a"),
        (b"x", b"a "),
        (b"x", b"\ta"),
        (b"x", b"a\t"),
        (b"x", b" "),
        (b"content-length", b""),
        (b"content-length", b"-1"),
        (b"content-length", b"+1"),
        (b"content-length", b"1,1"),
        (b"content-length", b"9" * 19),
        (b"content-length", b"\xb2"),
    ],
)
def test_a_request_with_a_forbidden_field_is_malformed(field: Field) -> None:
    for headers in (
        with_field(*field),
        [*with_field(*field), (b"x-last", b"1")],
        [*with_field(*field), (b"x-last", b"caf\xe9")],
    ):
        with pytest.raises(MalformedError):
            check_request(headers)


@pytest.mark.parametrize("name", [b":method", b":scheme", b":path"])
def test_a_request_needs_each_pseudo_header_once_and_filled(name: bytes) -> None:
    without = [field for field in REQUEST if field[0] != name]
    for headers in (without, [(name, b""), *without], [(name, b"x"), *REQUEST]):
        with pytest.raises(MalformedError):
            check_request(headers)


def test_pseudo_headers_come_in_any_order_but_first() -> None:
    for order in itertools.permutations(REQUEST[:4]):
        assert check_request([*order, *REQUEST[4:]]).path == check_request(REQUEST).path
    with pytest.raises(MalformedError):
        check_request([*REQUEST[1:5], REQUEST[0], *REQUEST[5:]])


def test_repeated_fields_that_decide_the_framing_must_agree() -> None:
    one, other = (b"content-length", b"7"), (b"content-length", b"8")
    assert check_request([*REQUEST, one, one]).content_length == 7
    with pytest.raises(MalformedError):
        check_request([*REQUEST, one, other])
    with pytest.raises(MalformedError):
        check_request([*REQUEST[:4], (b"te", b"gzip"), *REQUEST[4:]])


def test_values_that_metadata_cannot_carry_are_left_out() -> None:
    left_out = [
        (b"x-obs", b"caf\xe9"),
        (b"x-tab", b"a\tb"),
        (b"x-ctl", b"a\x01b"),
        (b"a-bin", b"AA"),
    ]
    request = check_request([*REQUEST, *left_out, (b"x-empty", b""), (b"x-last", b"1")])
    assert request.fields == {**check_request(REQUEST).fields, "x-empty": "", "x-last": "1"}
    assert check_request(with_field(b"a-bin", b"AA")).fields == check_request(REQUEST).fields
    with pytest.raises(MalformedError):
        check_request([(b":path", b"/\xe9"), *REQUEST[:2], *REQUEST[3:]])


def test_the_last_of_a_repeated_name_wins() -> None:
    assert check_request(with_field(b"x-request-id", b"r-2")).fields["x-request-id"] == "r-2"


def test_many_invented_names_are_not_remembered_for_ever() -> None:
    for number in range(0, 20_000, 10):
        check_trailers([(b"x-%d" % (number + at), b"") for at in range(10)])
    tracemalloc.start()
    for number in range(0, 100_000, 10):
        check_trailers([(b"y-%d" % (number + at), b"") for at in range(10)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000


def test_a_response_needs_a_valid_status_and_no_other_pseudo_header() -> None:
    response = check_response([(b":status", b"200"), (b"content-type", b"application/grpc")])
    assert (response.status, response.content_type) == (200, "application/grpc")
    assert check_response([(b":status", b"103")]).status == 103
    bad: list[Headers] = [
        [],
        [(b"content-type", b"x")],
        [(b":status", b"20")],
        [(b":status", b"099")],
        [(b":status", b"2x0")],
        [(b":status", b"2000")],
        [(b":status", b"200"), (b":status", b"200")],
        [(b":status", b"200"), (b":path", b"/")],
        [(b"a", b"b"), (b":status", b"200")],
    ]
    for headers in bad:
        with pytest.raises(MalformedError):
            check_response(headers)


def test_trailers_have_no_pseudo_header() -> None:
    check_trailers([])
    check_trailers([(b"grpc-status", b"0"), (b"x-bin", b"AA==")])
    for headers in ([(b":status", b"200")], [(b"a", b"b"), (b":path", b"/")], [(b"A", b"")]):
        with pytest.raises(MalformedError):
            check_trailers(headers)


anything = st.lists(
    st.tuples(
        st.sampled_from([name for name, _ in HeaderTable.STATIC_TABLE] + [b"te", b"x", b"x-bin"])
        | st.binary(max_size=4),
        st.sampled_from([b"trailers", b"0", b"", b"a b"]) | st.binary(max_size=8),
    ),
    max_size=8,
)


@given(anything, st.booleans())
def test_any_fields_are_sound_or_malformed_and_never_else(headers: Headers, complete: bool) -> None:
    parse_trailers(headers)
    for check in (check_request, check_response, check_trailers):
        try:
            check([*REQUEST, *headers] if complete else headers)
        except MalformedError:
            continue
        for _, value in headers:
            assert not set(value) & {0, 10, 13}
            assert value == value.strip(b" \t")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("4m", 0.004),
        ("5u", 5e-6),
        ("6n", 6e-9),
        ("0m", 0),
        ("99999999S", 99999999),
        ("00000001S", 1),
    ],
)
def test_a_timeout_is_digits_and_a_unit(text: str, seconds: float) -> None:
    assert parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "S", "1", "1s", "1h", "-1S", "+1S", " 1S", "1 S", "1.5S", "999999999S", "²S", "١S"]
)
def test_any_other_timeout_is_refused_without_harm_to_the_stream(text: str) -> None:
    with pytest.raises(TimeoutFormatError):
        parse_timeout(text)
    if text.isascii() and text == text.strip():
        request = check_request([*REQUEST[:9], (b"grpc-timeout", text.encode())])
        with pytest.raises(TimeoutFormatError):
            _ = request.timeout_s


# --- Writing


def read(block: bytes) -> Headers:
    headers = a_decoder().decode(block)
    assert plain([(n, v) for n, v in Decoder().decode(block, raw=True)]) == headers
    return headers


def test_a_request_of_ours_is_what_grpc_defines() -> None:
    block = request_block("/s/M", "host:1", scheme="https") + timeout_field(2)
    request = check_request(read(block + metadata_block([("x-a", "b")])))
    assert (request.method, request.scheme, request.path) == ("POST", "https", "/s/M")
    assert (request.authority, request.content_type) == ("host:1", "application/grpc")
    assert request.timeout_s == 2
    assert request.fields == {"user-agent": "forebay/0.1", "x-a": "b"}
    response = check_response(read(RESPONSE_BLOCK))
    assert (response.status, response.content_type) == (200, "application/grpc")


texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300)
names = st.from_regex(r"x-[a-z0-9_.-]{0,20}x", fullmatch=True)
metadata = st.lists(st.tuples(names, texts), max_size=6)


@given(metadata)
def test_text_metadata_survives_the_way(pairs: list[tuple[str, str]]) -> None:
    headers = read(metadata_block(pairs))
    check_trailers(headers)
    assert parse_trailers(headers).metadata == tuple((key, text.strip(" ")) for key, text in pairs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", "x"),
        ("Upper", "x"),
        (":path", "x"),
        ("a b", "x"),
        ("é", "x"),
        ("a-bin", "x"),
        ("te", "x"),
        ("connection", "x"),
        ("grpc-status", "0"),
        ("content-type", "x"),
        ("a", "\n"),
        ("a", "b\0"),
        ("a", "é"),
        ("a", "b\tc"),
        ("a", "\x7f"),
        ("a", "漢"),
    ],
)
def test_metadata_that_cannot_be_carried_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        metadata_block([(name, value)])


@given(st.floats(1e-9, 1e15))
@example(99_999.999)
@example(99_999_999.0)
@example(0.29)
def test_a_timeout_is_never_shorter_and_hardly_longer(seconds: float) -> None:
    ((name, value),) = read(timeout_field(seconds))
    assert name == b"grpc-timeout"
    sent = parse_timeout(value.decode())
    if seconds < 99_999:
        assert seconds * (1 - 1e-12) <= sent <= seconds + 0.0011
    elif seconds < 99_999_999 * 3600:
        assert seconds * (1 - 1e-12) <= sent <= seconds * 1.0001 + 1
    assert sent > 0


@pytest.mark.parametrize(
    ("seconds", "value"), [(0, b"0m"), (-1, b"0m"), (float("inf"), b"99999999H"), (1e-12, b"1m")]
)
def test_a_timeout_at_the_ends(seconds: float, value: bytes) -> None:
    assert read(timeout_field(seconds)) == [(b"grpc-timeout", value)]


@given(
    st.integers(0, 16),
    st.text(max_size=200),
    st.none() | st.binary(max_size=200),
    metadata,
)
def test_the_end_of_a_call_survives_the_way(
    code: int, message: str, details: bytes | None, pairs: list[tuple[str, str]]
) -> None:
    headers = read(trailers_block(code, message, details, pairs))
    check_trailers(headers)
    trailers = parse_trailers(headers)
    assert trailers.code == code
    assert trailers.message == message.encode("utf-8", "replace").decode()
    assert trailers.details == details
    assert trailers.metadata == tuple((key, text.strip(" ")) for key, text in pairs)


@given(
    st.text(max_size=60)
    | st.sampled_from(["", " ", "  ", " a ", "%", "%41", "a b", "\n", "漢字😀"])
)
def test_an_escaped_message_is_printable_and_comes_back(text: str) -> None:
    escaped = percent_encode(text)
    assert escaped.strip(b" ") == escaped
    assert all(0x20 <= octet < 0x7F for octet in escaped)
    assert percent_decode(escaped) == text.encode("utf-8", "replace").decode()


def test_messages_are_escaped_as_grpc_defines() -> None:
    assert percent_encode("a b%é\n~") == b"a b%25%C3%A9%0A~"


@pytest.mark.parametrize("letter", ["a", "é", "漢", "😀", "%"])
def test_a_long_message_is_cut_between_characters(letter: str) -> None:
    escaped = percent_encode(letter * 100_000)
    assert len(escaped) <= 3 * 2048
    text = percent_decode(escaped)
    assert set(text) == {letter}
    assert 2044 < len(text.encode()) <= 2048


def test_a_foreign_message_is_read_as_far_as_it_goes() -> None:
    assert percent_decode(b"50%") == "50%"
    assert percent_decode(b"%zz%4") == "%zz%4"
    assert percent_decode(b"%ff") == "\ufffd"


def test_foreign_trailers_are_read_as_far_as_they_go() -> None:
    headers: Headers = [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"5"),
        (b"grpc-status-details-bin", b"AAE="),
        (b"other-bin", b"AA"),
        (b"x-a", b"1"),
        (b"x-b", b"caf\xe9"),
        (b"x-a", b"2"),
    ]
    trailers = parse_trailers(headers)
    assert (trailers.code, trailers.message, trailers.details) == (5, "", b"\0\1")
    assert trailers.metadata == (("x-a", "1"), ("x-a", "2"))
    assert parse_trailers([]).code is None
    for value in (b"", b"x", b"-1", b"17", b"9" * 5000):
        assert parse_trailers([(b"grpc-status", value)]).code == 2
    for value in (b"A", b"!!!!", b"AA,AA", b"\xff"):
        assert parse_trailers([(b"grpc-status-details-bin", value)]).details is None


def test_a_code_that_grpc_does_not_know_is_sent_as_unknown() -> None:
    for code in (-1, 17):
        assert parse_trailers(read(trailers_block(code, "", None, ()))).code == 2
