"""What the rules behind llhttp take, refuse and write."""

import gzip
import zlib

import pytest
from forebay_common.errors import ForebayError, Reason
from forebay_wire.core import http1
from forebay_wire.core.http1 import HttpLimits, Writer, check_size, decode_body, read_head

_HOST = (b"Host", b"x")


def a_head(
    *fields: tuple[bytes, bytes],
    method: bytes = b"POST",
    target: bytes = b"/v1",
    version: str = "1.1",
) -> http1.RequestHead:
    return read_head(method, target, version, (_HOST, *fields))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models", "/v1/models"),
        (b"/v1/models?limit=3#x", "/v1/models"),
        (b"/v1/models/a%40b%2Fc", "/v1/models/a@b/c"),
        (b"/%ff%00", "/\ufffd\0"),
        (b"http://host:1/v1/models?x", "/v1/models"),
        (b"HTTPS://host", "/"),
        (b"*", "*"),
        (b"host:443", "host:443"),
        (b"", ""),
    ],
)
def test_a_target_becomes_a_path(target: bytes, path: str) -> None:
    assert a_head(target=target).path == path


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        ("1.1", None, True),
        ("1.1", b"close", False),
        ("1.1", b"Keep-Alive, Close", False),
        ("1.1", b"upgrade", True),
        ("1.0", None, False),
        ("1.0", b"Keep-Alive", True),
        ("1.0", b"keep-alive, close", False),
    ],
)
def test_a_connection_is_kept_as_its_client_wishes(
    version: str, connection: bytes | None, keeps_alive: bool
) -> None:
    fields = () if connection is None else ((b"Connection", connection),)
    assert a_head(*fields, version=version).keeps_alive is keeps_alive


def test_options_in_two_connection_headers_count_together() -> None:
    assert not a_head((b"Connection", b"keep-alive"), (b"connection", b"close")).keeps_alive


def test_of_a_repeated_header_the_first_counts_and_of_a_list_all() -> None:
    head = a_head((b"A", b"1"), (b"a", b"2"), (b"Tracestate", b"x=1"), (b"tracestate", b"y=2"))
    assert head.text(b"a") == "1"
    assert head.text(b"tracestate") == "x=1, y=2"
    assert head.text(b"b") is None


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ((), 0),
        (((b"Content-Length", b"5 "),), 5),
        (((b"Transfer-Encoding", b"Chunked"),), None),
    ],
)
def test_a_bodys_length_is_known_or_it_comes_in_chunks(
    fields: tuple[tuple[bytes, bytes], ...], length: int | None
) -> None:
    assert a_head(*fields).length == length


@pytest.mark.parametrize(
    ("fields", "version", "expects"),
    [
        (((b"Expect", b"100-Continue"), (b"Content-Length", b"5")), "1.1", True),
        (((b"Expect", b"100-continue"), (b"Transfer-Encoding", b"chunked")), "1.1", True),
        (((b"Expect", b"100-continue"),), "1.1", False),
        (((b"Expect", b"100-continue"), (b"Content-Length", b"0")), "1.1", False),
        (((b"Expect", b"100-continue"), (b"Content-Length", b"5")), "1.0", False),
        (((b"Expect", b"miracles"), (b"Content-Length", b"5")), "1.1", False),
    ],
)
def test_only_a_client_with_a_body_waits_for_a_word(
    fields: tuple[tuple[bytes, bytes], ...], version: str, expects: bool
) -> None:
    assert a_head(*fields, version=version).expects is expects


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ((), "1.1"),
        ((_HOST, _HOST), "1.1"),
        ((_HOST, (b"host", b"y")), "1.0"),
        ((_HOST,), "0.9"),
        ((_HOST,), "2.0"),
        ((_HOST, (b"Transfer-Encoding", b"gzip, chunked")), "1.1"),
        ((_HOST, (b"Transfer-Encoding", b"identity")), "1.1"),
        ((_HOST, (b"Transfer-Encoding", b"chunked")), "1.0"),
        ((_HOST, (b"Transfer-Encoding", b"chunked"), (b"transfer-encoding", b"chunked")), "1.1"),
        ((_HOST, (b"Content-Length", b"5"), (b"content-length", b"5")), "1.1"),
    ],
)
def test_where_a_request_ends_is_beyond_dispute(
    fields: tuple[tuple[bytes, bytes], ...], version: str
) -> None:
    with pytest.raises(ForebayError) as caught:
        read_head(b"POST", b"/", version, fields)
    assert caught.value.status.http == 400


def test_heads_are_held_against_their_limits() -> None:
    limits = HttpLimits(header_bytes=1000, headers=10)
    check_size(b"/", [(b"a", b"b")] * 10, limits)
    for target, fields in (
        (b"/", [(b"a", b"b")] * 11),
        (b"/" * 1000, []),
        (b"/", [(b"a", b"b" * 1000)]),
        (b"/", [(b"a" * 100, b"b" * 150)] * 4),
    ):
        with pytest.raises(ForebayError) as caught:
            check_size(target, fields, limits)
        assert caught.value.reason is Reason.HEADERS_TOO_LARGE
        assert caught.value.status.http == 431


def test_a_chunked_body_may_be_small_or_slow_but_not_all_framing() -> None:
    assert not http1.is_mostly_framing(40_000, 1)
    assert not http1.is_mostly_framing(3 << 20, 1 << 20)
    assert http1.is_mostly_framing(6 << 20, 1 << 20)


_BODY = b'{"model": "x"}' * 10
_RAW = zlib.compressobj(wbits=-15)
_DEFLATED = _RAW.compress(_BODY) + _RAW.flush()


@pytest.mark.parametrize(
    ("encoding", "sent"),
    [
        (b"", _BODY),
        (b"Identity", _BODY),
        (b"gzip", gzip.compress(_BODY)),
        (b" X-GZIP ", gzip.compress(_BODY)),
        (b"deflate", zlib.compress(_BODY)),
        (b"deflate", _DEFLATED),
    ],
)
def test_a_body_is_decoded(encoding: bytes, sent: bytes) -> None:
    assert decode_body(sent, encoding, HttpLimits()) == _BODY


@pytest.mark.parametrize(
    ("encoding", "sent", "reason"),
    [
        (b"gzip", b"no gzip", Reason.INVALID_ARGUMENT),
        (b"gzip", b"", Reason.INVALID_ARGUMENT),
        (b"gzip", gzip.compress(_BODY)[:-1], Reason.INVALID_ARGUMENT),
        (b"gzip", gzip.compress(_BODY) + b"x", Reason.INVALID_ARGUMENT),
        (b"deflate", b"", Reason.INVALID_ARGUMENT),
        (b"br", b"x", Reason.INVALID_ARGUMENT),
        (b"gzip, gzip", b"x", Reason.INVALID_ARGUMENT),
        (b"gzip", gzip.compress(bytes(1 << 20)), Reason.BODY_TOO_LARGE),
        (b"deflate", zlib.compress(bytes((1 << 10) + 1)), Reason.BODY_TOO_LARGE),
    ],
)
def test_a_body_that_is_not_what_it_says_or_grows_too_far_is_refused(
    encoding: bytes, sent: bytes, reason: Reason
) -> None:
    with pytest.raises(ForebayError) as caught:
        decode_body(sent, encoding, HttpLimits(body_bytes=1 << 10))
    assert caught.value.reason is reason


def test_a_whole_answers_head() -> None:
    head = Writer("me").whole(
        503,
        "text/plain",
        5,
        date=b"now\r\n\r\n",
        request_id="req-1",
        connection="close",
        extra=[("Retry-After", "1")],
    )
    assert head == (
        b"HTTP/1.1 503 Service Unavailable\r\nServer: me\r\nContent-Type: text/plain\r\n"
        b"Content-Length: 5\r\nRetry-After: 1\r\nConnection: close\r\nX-Request-Id: req-1\r\n"
        b"Date: now\r\n\r\n"
    )


def test_a_streams_head_says_how_its_body_ends() -> None:
    writer = Writer("me")
    for _ in range(2):
        chunked = writer.stream(
            "text/event-stream", date=b"now\r\n\r\n", request_id="a", chunked=True, closes=False
        )
        closing = writer.stream(
            "text/event-stream", date=b"now\r\n\r\n", request_id="b", chunked=False, closes=True
        )
        assert b"\r\nTransfer-Encoding: chunked\r\n" in chunked
        assert b"\r\nConnection: close\r\n" not in chunked
        assert chunked.endswith(b"X-Request-Id: a\r\nDate: now\r\n\r\n")
        assert b"Transfer-Encoding" not in closing
        assert b"\r\nConnection: close\r\nX-Request-Id: b\r\n" in closing


def test_a_replica_cannot_write_headers_of_its_own() -> None:
    writer = Writer("me")
    whole = writer.whole(200, "a/b\r\nX-Evil: 1", 0, date=b"\r\n\r\n", request_id="a")
    stream = writer.stream(
        "text/event-stream\r\n\r\n", date=b"\r\n\r\n", request_id="a", chunked=True, closes=False
    )
    assert b"Evil" not in whole
    assert stream.count(b"\r\n\r\n") == 1
    for number in range(1000):
        writer.stream(
            f"text/{number}", date=b"\r\n\r\n", request_id="a", chunked=True, closes=False
        )
    assert len(writer._fixed) <= 64
