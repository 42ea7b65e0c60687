"""Carries requests to where a policy sends them, and their answers back, without decoding them.

Invariants: each admitted request ends with exactly one `on_end`; its caller is told exactly one of
`finish` and `fail`, unless it left; no attempt outlives its caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from struct import Struct
from typing import Protocol

from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, from_status

from forebay_wire.client import ClientPool
from forebay_wire.core.connection import Connection
from forebay_wire.core.frames import ErrorCode
from forebay_wire.core.headers import (
    Headers,
    MalformedError,
    Trailers,
    check_response,
    check_trailers,
    metadata_block,
    parse_trailers,
    request_block,
    timeout_field,
)
from forebay_wire.core.messages import (
    PREFIX_BYTES,
    Boundary,
    MessageError,
    MessageReader,
    frame,
)
from forebay_wire.core.stream import OnData, Receiver, Stream
from forebay_wire.metrics import GAP_BOUNDS_S, TIMED_CALLS, WireMetrics
from forebay_wire.policy import (
    Decision,
    Fail,
    Finish,
    Head,
    Outcome,
    Policy,
    Progress,
    Resume,
    Retry,
    Route,
)
from forebay_wire.rival import Rival

_log = logging.getLogger(__name__)
_PASSED_ON = frozenset((md.USAGE, md.REPLICA, md.REQUEST_ID))
# A peer that refuses a stream, or ends its connection in order, has not touched it: the request is
# sent again without asking the policy, after these pauses. C-core's servers go on counting a stream
# for a moment after its client has seen its end, and so refuse some that are within the limit.
_RESEND_PAUSES_S = (0.0, 0.002, 0.01, 0.05, 0.25)
_UNAVAILABLE = 14
# How often it is looked at, within the time that an attempt may say nothing, whether it does.
_LOOKS = 4
_BY_HTTP_STATUS = {429: _UNAVAILABLE, 502: _UNAVAILABLE, 503: _UNAVAILABLE, 504: _UNAVAILABLE}


_length_of = Struct(">I").unpack_from
_USUAL_ANSWER = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_USUAL_TRAILERS = {key.encode(): key for key in _PASSED_ON} | {b"grpc-status": ""}


class Caller(Protocol):
    """The end of a call that faces whoever asked. Called from the event loop, and never before
    `Relay.call` has returned."""

    def begin(self, call: Call) -> None:
        """The answer begins; nothing of it was told before. `call.encoding` is known."""
        ...

    def forward(self, data: bytes, start: int, end: int) -> None:
        """Take `data[start:end]`: messages with their length prefixes, cut anywhere."""
        ...

    def finish(self, trailing: md.Metadata) -> None:
        """The answer is whole."""
        ...

    def fail(self, error: ForebayError, trailing: md.Metadata) -> None:
        """The request was refused or failed, before or after it began."""
        ...


class Relay:
    """Carries requests."""

    def __init__(
        self,
        policy: Policy,
        pool: ClientPool,
        *,
        trailing: md.Metadata = (),
        metrics: WireMetrics | None = None,
    ) -> None:
        """`trailing` is what this hop adds to the trailing metadata of each answer."""
        self.policy = policy
        self.pool = pool
        self.trailing = trailing
        self.metrics = metrics if metrics is not None else WireMetrics()
        overrides = type(policy).on_first is not Policy.on_first
        self.on_first = policy.on_first if overrides else None
        """Asked at an attempt's first message, where the policy cares."""
        self.loop = asyncio.get_running_loop()

    def call(
        self,
        head: Head,
        message: bytes,
        caller: Caller,
        *,
        compressed: bytes | None = None,
        encoding: str = "",
        accept_encoding: str = "",
    ) -> Call:
        """Start a request.

        Args:
            head: the request.
            message: its message, not compressed, without its prefix.
            caller: gets the answer.
            compressed: the message as it came, when it came compressed; this is what is sent on.
            encoding: how `compressed` is compressed.
            accept_encoding: which compressed answers the caller takes, in gRPC's form.
        """
        call = Call(self, head, message, caller)
        if compressed is not None or accept_encoding:
            call.compressed, call.encodings = compressed, (encoding, accept_encoding)
        call.start()
        return call

    async def stream(
        self, head: Head, message: bytes, progress: Progress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Answer a request message by message. Closing the generator cancels the request.

        Args:
            head: the request.
            message: its encoded message.
            progress: the caller's own, to read usage and trailing metadata from afterwards.

        Raises:
            ForebayError: the request was refused or failed.
        """
        reader = _Reader(self.pool.message_bytes)
        call = Call(self, head, message, reader)
        if progress is not None:
            call.progress = progress
        call.start()
        try:
            while (part := await reader.next(call)) is not None:
                yield part
        finally:
            call.cancel()

    async def unary(self, head: Head, message: bytes, progress: Progress | None = None) -> bytes:
        """Answer a request whose method gives one message.

        Raises:
            ForebayError: the request was refused or failed.
        """
        parts = [part async for part in self.stream(head, message, progress)]
        if len(parts) != 1:
            raise ForebayError(Reason.INTERNAL, "The replica failed.")
        return parts[0]


class Call:
    """One request on its way. Receives for the stream of its present attempt."""

    __slots__ = (
        "_admission",
        "_answered",
        "_before",
        "_boundary",
        "_caller",
        "_deadline",
        "_done",
        "_forward",
        "_gaps",
        "_hedge",
        "_held",
        "_idle",
        "_is_timed",
        "_kept",
        "_kept_bytes",
        "_last_s",
        "_message",
        "_message_bytes",
        "_messages",
        "_patience",
        "_pause",
        "_relay",
        "_resends",
        "_route",
        "_seen_bytes",
        "_status",
        "_stream",
        "_tail",
        "_waits_at",
        "compressed",
        "encoding",
        "encodings",
        "head",
        "progress",
    )

    def __init__(self, relay: Relay, head: Head, message: bytes, caller: Caller) -> None:
        self.head = head
        self.progress = Progress(started_s=time.monotonic())
        self.encoding = ""
        """How the answer's messages are compressed, where they are."""
        self.compressed: bytes | None = None
        self.encodings: tuple[str, str] | None = None
        self._relay = relay
        self._message = message
        self._caller = caller
        self._forward: OnData = caller.forward
        self._route: Route | None = None
        self._stream: Stream | None = None
        self._admission: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_at: str | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._status = 0
        self._answered = False
        self._boundary: Boundary | None = None
        self._held = False
        self._done = False
        self._resends = 0
        self._messages = 0
        self._message_bytes = 0
        self._before = 0
        """Messages of the attempts before this one."""
        self._kept: list[bytes] | None = None
        """What was forwarded, while it can be resumed from."""
        self._kept_bytes = 0
        self._tail = b""
        """A message that is not whole yet, of an answer that is kept."""
        self._patience: asyncio.TimerHandle | None = None
        self._hedge: asyncio.TimerHandle | Rival | None = None
        """The second attempt, or when it is asked for."""
        self._idle = 0
        self._seen_bytes = 0
        self._last_s = 0.0
        self._gaps = relay.metrics.gaps
        self._is_timed = relay.metrics.calls % TIMED_CALLS == 0

    # --- What its caller asks ------------------------------------------------------------------

    def start(self) -> None:
        """Ask the policy, and go."""
        relay = self._relay
        relay.metrics.calls += 1
        try:
            admitted = relay.policy.admit(self.head, self._message)
        except ForebayError as error:
            relay.loop.call_soon(self._refuse, error)
            return
        except Exception:
            _log.exception("unexpected error in a policy")
            relay.loop.call_soon(self._refuse, _unexpected())
            return
        if isinstance(admitted, Route):
            self._begin(admitted)
        else:
            self._admission = relay.loop.create_task(self._wait(admitted))

    def cancel(self) -> None:
        """The caller left. Harmless when the call has ended."""
        if self._done:
            return
        self._done = True
        self._stop()
        self._tell()
        if self._route is not None:
            self._end(Outcome.CANCELLED, None)

    def hold(self) -> None:
        """The caller cannot take more now: the next hop gets no more credit."""
        self._held = True
        if self._stream is not None:
            self._stream.hold()

    def resume(self) -> None:
        """The caller can take more again."""
        self._held = False
        if self._stream is not None:
            self._stream.resume()

    def trickle(self, kept_bytes: int) -> None:
        """The caller, which cannot take more, has come down to `kept_bytes` that it keeps: the next
        hop sees in time that somebody still reads."""
        if self._stream is not None:
            self._stream.trickle(kept_bytes)

    @property
    def answer(self) -> md.Metadata:
        """What its policy tells the caller beside the answer."""
        return self._route.answer if self._route is not None else ()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done

    # --- What the pool tells -------------------------------------------------------------------

    def on_connection(self, connection: Connection) -> None:
        """See `client.Opening`."""
        self._waits_at = None
        route = self._route
        assert route is not None, "a call goes where its route says"
        self._status = 0
        self._stream = self.open_on(connection, route, self)

    def open_on(self, connection: Connection, route: Route, receiver: Receiver) -> Stream:
        """Send the request as a route says."""
        block = request_block(
            self.head.method.path, _authority(route.target), scheme=self._relay.pool.scheme
        )
        if route.deadline is not None:
            block += timeout_field(route.deadline - time.monotonic())
        if self.encodings is not None:
            encoding, accepted = self.encodings
            if self.compressed is not None and route.message is None:
                block += metadata_block((("grpc-encoding", encoding),))
            # What is kept must be read after a failure.
            if accepted and not route.kept_bytes:
                block += metadata_block((("grpc-accept-encoding", accepted),))
        block += metadata_block(route.metadata)
        stream = connection.open(receiver)
        if self._held:
            stream.hold()
        stream.send_headers(block)
        if route.message is not None:
            stream.send_whole(frame(route.message))
        elif self.compressed is not None:
            stream.send_whole(frame(self.compressed, compressed=True))
        else:
            stream.send_whole(frame(self._message))
        return stream

    def on_unreachable(self, error: ForebayError) -> None:
        """See `client.Opening`."""
        self._waits_at = None
        if not self._done:
            self._fail_attempt(error)

    # --- What the attempt's stream tells ---------------------------------------------------------

    def on_headers(self, headers: Headers, ended: bool) -> None:
        """See `core.connection.Receiver`."""
        if ended:
            if self._status == 200 and (trailing := _usual_ending(headers)) is not None:
                self._stream = None
                self._succeed(trailing)
                return
        elif not self._status and headers == _USUAL_ANSWER:
            self._status = 200
            return
        try:
            if not self._status:
                response = check_response(headers)
                if response.status < 200 and not ended:
                    return
                self._status = response.status
                self.encoding = response.encoding
                if not response.content_type.startswith("application/grpc"):
                    self._status = self._status if self._status != 200 else -1
                if not ended:
                    return
            elif ended:
                check_trailers(headers)
        except MalformedError:
            self._drop(ErrorCode.PROTOCOL_ERROR)
            self._fail_attempt(_broken())
            return
        if not ended:
            self._drop(ErrorCode.PROTOCOL_ERROR)
            self._fail_attempt(_broken())
            return
        self._stream = None
        self._conclude(parse_trailers(headers))

    def on_data(self, data: bytes, start: int, end: int) -> None:
        """The first payload of an attempt."""
        stream = self._stream
        if self._done or stream is None:
            return
        if self._status != 200:
            # No gRPC server: its body is of no use.
            if not self._status:
                self._drop(ErrorCode.PROTOCOL_ERROR)
                self._fail_attempt(_broken())
            return
        now = stream.connection.now
        self._last_s = now
        route, relay = self._route, self._relay
        assert route is not None, "a call goes where its route says"
        if self._hedge is not None:
            self._end_hedge()
        if not self._answered:
            self._answered = True
            self.progress.first_message_s = time.monotonic()
            relay.metrics.answers += 1
            if route.kept_bytes and not self.encoding:
                self._kept, self._kept_bytes = [], route.kept_bytes
            self._caller.begin(self)
        if relay.on_first is not None:
            relay.on_first(self.head, route, self.progress)
        if self._kept is not None:
            stream.on_data = self._pass_on_kept
        else:
            stream.on_data = self._pass_on_timed if self._is_timed else self._pass_on
        stream.on_data(data, start, end)

    def on_end(self) -> None:
        """See `core.connection.Receiver`: an answer without trailers."""
        self._stream = None
        if not self._done:
            code = _BY_HTTP_STATUS.get(self._status, 2)
            self._conclude(Trailers(code, "", None, ()))

    def on_reset(self, code: ErrorCode) -> None:
        """See `core.connection.Receiver`."""
        self._stream = None
        if self._done:
            return
        if (
            code is ErrorCode.REFUSED_STREAM
            and not self._status
            and self._resends < len(_RESEND_PAUSES_S)
        ):
            pause_s = _RESEND_PAUSES_S[self._resends]
            self._resends += 1
            self._pause = self._relay.loop.call_later(pause_s, self._attempt)
            return
        if code is ErrorCode.CANCEL and self._is_expired():
            self._fail_attempt(_expired())
        else:
            self._fail_attempt(
                ForebayError(Reason.REPLICA_LOST, "The replica's connection was lost.")
            )

    def on_blocked(self) -> None:
        """See `core.connection.Receiver`: the request waits for the next hop's window."""

    def on_drained(self) -> None:
        """See `core.connection.Receiver`."""

    def _pass_on_timed(self, data: bytes, start: int, end: int) -> None:
        """Payload after the first, of a call whose gaps are measured."""
        if self._stream is not None:
            now = self._stream.connection.now
            if now > self._last_s:
                self._gaps[bisect_left(GAP_BOUNDS_S, now - self._last_s)] += 1
                self._last_s = now
            self._pass_on(data, start, end)

    def _pass_on(self, data: bytes, start: int, end: int) -> None:
        """Payload. This is the token path: it runs once per token."""
        if self._stream is None:
            return
        self._message_bytes += end - start
        # Nearly always a frame is one message; only else its boundaries must be followed.
        if (
            self._boundary is None
            and end - start >= PREFIX_BYTES
            and start + PREFIX_BYTES + _length_of(data, start + 1)[0] == end
        ):
            self._messages += 1
        else:
            if self._boundary is None:
                self._boundary = Boundary()
            self._messages += self._boundary.advance(data, start, end)
        # Through a name of its own: the interpreter then reads the slot directly.
        forward = self._forward
        forward(data, start, end)

    def _pass_on_kept(self, data: bytes, start: int, end: int) -> None:
        """Payload of an answer that can be resumed: messages go on whole, and are kept."""
        stream, kept = self._stream, self._kept
        if stream is None or kept is None:
            return
        if self._is_timed:
            now = stream.connection.now
            if now > self._last_s:
                self._gaps[bisect_left(GAP_BOUNDS_S, now - self._last_s)] += 1
                self._last_s = now
        if (
            self._tail
            or end - start < PREFIX_BYTES
            or start + PREFIX_BYTES + _length_of(data, start + 1)[0] != end
        ):
            data = self._tail + data[start:end]
            start, end, messages = 0, *_whole(data)
            self._tail = data[end:]
            if len(self._tail) > self._relay.pool.message_bytes + PREFIX_BYTES:
                self._drop(ErrorCode.CANCEL)
                self._fail_attempt(_broken())
                return
            if not messages:
                return
            self._messages += messages
        else:
            self._messages += 1
        self._message_bytes += end - start
        self._kept_bytes -= end - start
        if self._kept_bytes >= 0:
            kept.append(data[start:end])
        elif not self._tail:
            # It has outgrown its limit, and goes on as any other.
            self._kept = None
            stream.on_data = self._pass_on_timed if self._is_timed else self._pass_on
        forward = self._forward
        forward(data, start, end)

    # --- The course of a call ------------------------------------------------------------------

    async def _wait(self, admission: Awaitable[Route]) -> None:
        try:
            route = await admission
        except ForebayError as error:
            self._admission = None
            self._refuse(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("unexpected error in a policy")
            self._admission = None
            self._refuse(_unexpected())
        else:
            self._admission = None
            self._begin(route)

    def _begin(self, route: Route) -> None:
        self._route = route
        if route.deadline is not None:
            loop = self._relay.loop
            delay_s = max(0.0, route.deadline - time.monotonic())
            self._deadline = loop.call_later(delay_s, self._expire)
        self._attempt()

    def _attempt(self) -> None:
        self._pause = None
        route = self._route
        assert route is not None, "a call goes where its route says"
        if self._patience is None and (route.silence_s or route.first_message_s):
            self._idle, self._seen_bytes = 0, self._message_bytes
            self._be_patient(route)
        if self._hedge is None and route.hedge_s and not self._answered:
            self._hedge = self._relay.loop.call_later(route.hedge_s, self._start_rival)
        pool = self._relay.pool
        connection = pool.find(route.target)
        if connection is not None:
            self.on_connection(connection)
        else:
            self._waits_at = route.target
            pool.wait(route.target, self)

    def _refuse(self, error: ForebayError) -> None:
        """The policy did not let it in."""
        if not self._done:
            self._done = True
            self._tell().fail(error, self._relay.trailing + error.answer)

    def _be_patient(self, route: Route) -> None:
        """Look again after a part of the time that the attempt may say nothing."""
        has_begun = self._messages > self._before
        limit_s = route.silence_s if has_begun else route.first_message_s
        pause_s = (limit_s or route.silence_s or 0.0) / _LOOKS
        if pause_s:
            self._patience = self._relay.loop.call_later(pause_s, self._look, route, limit_s)

    def _look(self, route: Route, limit_s: float | None) -> None:
        self._patience = None
        if self._done or self._route is not route or self._admission is not None:
            return
        # Who does not read what it is sent cannot say that nothing comes.
        moved = self._seen_bytes != self._message_bytes or self._held
        self._seen_bytes = self._message_bytes
        self._idle = 0 if moved or limit_s is None else self._idle + 1
        if self._idle >= _LOOKS:
            self._drop(ErrorCode.CANCEL)
            self._fail_attempt(ForebayError(Reason.REPLICA_LOST, "The replica stopped answering."))
        else:
            self._be_patient(route)

    def _expire(self) -> None:
        self._deadline = None
        if self._done or self._admission is not None:
            return
        self._drop(ErrorCode.CANCEL)
        self._fail_attempt(_expired())

    def _conclude(self, trailers: Trailers) -> None:
        """The attempt has ended by itself."""
        if self._done:
            return
        trailing = tuple((key, value) for key, value in trailers.metadata if key in _PASSED_ON)
        self.progress.trailing = self._relay.trailing + trailing
        code = trailers.code
        if code is None:
            code = 2 if self._status == 200 else _BY_HTTP_STATUS.get(self._status, 2)
        if code == 0:
            self._succeed(trailing)
            return
        error = from_status(code, trailers.details)
        if error.reason is Reason.CANCELLED:
            # A hop that cancels because its own clock ran out means the deadline. We did not
            # cancel it, so otherwise the replica did: it is going away.
            lost = ForebayError(Reason.REPLICA_LOST, "The replica ended the call.")
            error = _expired() if self._is_expired() else lost
        self._fail_attempt(error)

    def _succeed(self, trailing: md.Metadata) -> None:
        """The attempt has ended well, with this of Forebay's own trailing metadata."""
        if self._done:
            return
        if self._tail or (self._boundary is not None and not self._boundary.at_boundary):
            self._fail_attempt(_broken())
            return
        self._done = True
        self._stop()
        progress = self.progress
        for key, value in trailing:
            if key == md.USAGE:
                progress.usage = md.Usage.decode(value)
        progress.trailing = self._relay.trailing + trailing
        if not self._answered:
            self._answered = True
            self._caller.begin(self)
        route = self._route
        assert route is not None, "only an admitted call ends"
        self._tell().finish(progress.trailing + route.answer)
        self._end(Outcome.SUCCEEDED, None)

    def _start_rival(self) -> None:
        self._hedge = None
        if self._done or self._answered or self._route is None or self._admission is not None:
            return
        try:
            route = self._relay.policy.hedge(self.head, self._route, self._count())
        except Exception:
            _log.exception("unexpected error in a policy")
            return
        if route is not None:
            self._hedge = rival = Rival(self, self._relay.pool, route)
            rival.start()

    def won_by(self, rival: Rival) -> None:
        """See `rival.Hedged`."""
        self._hedge = None
        self._drop(ErrorCode.CANCEL)
        assert self._route is not None, "a rival has a first attempt beside it"
        self._tell_dropped(self._route, None)
        self._adopt(rival)

    def lost_by(self, rival: Rival, error: ForebayError) -> None:
        """See `rival.Hedged`."""
        self._hedge = None
        self._tell_dropped(rival.route, error)

    def _adopt(self, rival: Rival) -> None:
        """Go on with the rival as the only attempt."""
        self._route = rival.route
        rival.withdraw()
        stream, self._stream = rival.stream, rival.stream
        if stream is None:
            self._attempt()
            return
        stream.receiver, stream.on_data = self, self.on_data
        self._status = 0
        for headers, ended in rival.headers():
            self.on_headers(headers, ended)

    def _tell_dropped(self, route: Route, error: ForebayError | None) -> None:
        try:
            self._relay.policy.on_dropped(self.head, route, error)
        except Exception:
            _log.exception("unexpected error in a policy")

    def _end_hedge(self) -> None:
        """The first attempt has won, or the call has ended."""
        hedge, self._hedge = self._hedge, None
        if isinstance(hedge, Rival):
            hedge.drop()
            if not self._done:
                self._tell_dropped(hedge.route, None)
        elif hedge is not None:
            hedge.cancel()

    def _fail_attempt(self, error: ForebayError) -> None:
        if isinstance(self._hedge, Rival):
            rival, self._hedge = self._hedge, None
            assert self._route is not None, "a rival has a first attempt beside it"
            self._tell_dropped(self._route, error)
            self._adopt(rival)
            return
        self._admission = self._relay.loop.create_task(self._decide(error))

    async def _decide(self, error: ForebayError) -> None:
        """Ask the policy what follows a failed attempt."""
        route = self._route
        assert route is not None, "only an attempt can fail"
        try:
            progress = self._count()
            progress.attempt_messages = self._messages - self._before
            progress.delivered = self._delivered()
            decision = await self._relay.policy.on_failure(self.head, route, error, progress)
            progress.delivered = None
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("unexpected error in a policy")
            decision = Fail(_unexpected())
        self._admission = None
        if self._done:
            return
        if isinstance(decision, Finish):
            self._tail, self._boundary = b"", None
            self._succeed(decision.trailing)
            return
        following = self._following(decision)
        if following is None:
            self._done = True
            self._stop()
            final = decision.error if isinstance(decision, Fail) else error
            trailing = self.progress.trailing or self._relay.trailing
            self._tell().fail(final, trailing + final.answer)
            self._end(Outcome.FAILED, final)
            return
        self._route = following
        self._before = self._messages
        self._boundary = None
        self._tail = b""
        self._resends = 0
        self.progress.trailing = ()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._hedge is not None:
            self._end_hedge()
        if self._deadline is None and self._is_expired():
            self._fail_attempt(_expired())
        else:
            self._attempt()

    def _following(self, decision: Decision) -> Route | None:
        """The route of the next attempt, where the decision can be obeyed."""
        if isinstance(decision, Retry):
            return None if self._answered else decision.route
        if isinstance(decision, Resume):
            return decision.route if self._kept is not None else None
        return None

    def _delivered(self) -> list[bytes] | None:
        """The messages that reached the caller, where all were kept."""
        if self._kept is None or self._kept_bytes < 0:
            return None
        delivered = []
        for data in self._kept:
            start = 0
            while start < len(data):
                if data[start]:
                    return None
                stop = start + PREFIX_BYTES + _length_of(data, start + 1)[0]
                delivered.append(data[start + PREFIX_BYTES : stop])
                start = stop
        return delivered

    def _count(self) -> Progress:
        """What has reached the caller so far; counted in the call itself while it flows."""
        progress = self.progress
        progress.messages, progress.message_bytes = self._messages, self._message_bytes
        return progress

    def _tell(self) -> Caller:
        """Give the caller up for its last word: without this, both would wait for the collector."""
        caller, self._caller, self._forward = self._caller, _GONE, _GONE.forward
        return caller

    def _end(self, outcome: Outcome, error: ForebayError | None) -> None:
        assert self._route is not None, "only an admitted call ends"
        metrics, progress = self._relay.metrics, self._count()
        metrics.messages += progress.messages
        metrics.message_bytes += progress.message_bytes
        try:
            if self._route.tells_delivered:
                progress.delivered = self._delivered()
            self._relay.policy.on_end(self.head, self._route, outcome, error, progress)
        except Exception:
            _log.exception("unexpected error in a policy")

    def _stop(self) -> None:
        """Let go of whatever the call waits for."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._hedge is not None:
            self._end_hedge()
        if self._admission is not None:
            self._admission.cancel()
            self._admission = None
        self._drop(ErrorCode.CANCEL)

    def _drop(self, code: ErrorCode) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._waits_at is not None:
            self._relay.pool.withdraw(self._waits_at, self)
            self._waits_at = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.reset(code)

    def _is_expired(self) -> bool:
        route = self._route
        deadline = route.deadline if route is not None else self.head.deadline
        return deadline is not None and time.monotonic() >= deadline


class _Gone:
    """The caller of a call that has ended."""

    def begin(self, call: Call) -> None:
        """Nothing to do."""

    def forward(self, data: bytes, start: int, end: int) -> None:
        """Nothing to do."""

    def finish(self, trailing: md.Metadata) -> None:
        """Nothing to do."""

    def fail(self, error: ForebayError, trailing: md.Metadata) -> None:
        """Nothing to do."""


_GONE = _Gone()


class _Reader:
    """A caller that keeps messages until they are asked for."""

    def __init__(self, message_bytes: int) -> None:
        self._messages: deque[bytes] = deque()
        self._reader = MessageReader(message_bytes)
        self._ended = False
        self._error: ForebayError | None = None
        self._news = asyncio.Event()
        self._call: Call | None = None

    async def next(self, call: Call) -> bytes | None:
        """The next message; None after the last."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            call.resume()
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()

    def begin(self, call: Call) -> None:
        """See `Caller`."""
        self._call = call

    def forward(self, data: bytes, start: int, end: int) -> None:
        """See `Caller`."""
        try:
            messages = self._reader.feed(data, start, end)
        except MessageError:
            self._error = _broken()
            if self._call is not None:
                self._call.cancel()
        else:
            self._messages.extend(message for _, message in messages)
            if self._call is not None:
                self._call.hold()
        self._news.set()

    def finish(self, trailing: md.Metadata) -> None:
        """See `Caller`."""
        self._ended = True
        self._news.set()

    def fail(self, error: ForebayError, trailing: md.Metadata) -> None:
        """See `Caller`."""
        self._error = error
        self._news.set()


def _usual_ending(headers: Headers) -> md.Metadata | None:
    """What passes of the trailers of a call that ended well; None where there is more to look at.

    Nearly all calls end so. Names that are known need no check, and values are checked by what
    writes them.
    """
    passed: list[tuple[str, str]] = []
    ended_well = False
    for name, value in headers:
        key = _USUAL_TRAILERS.get(name)
        if key:
            text = value.decode("latin-1")
            if not (text.isascii() and text.isprintable()):
                return None
            passed.append((key, text))
        elif key is None or value != b"0":
            return None
        else:
            ended_well = True
    return tuple(passed) if ended_well else None


def _whole(data: bytes) -> tuple[int, int]:
    """Where the last whole message in `data` ends, and how many there are."""
    end = messages = 0
    while end + PREFIX_BYTES <= len(data):
        stop = end + PREFIX_BYTES + _length_of(data, end + 1)[0]
        if stop > len(data):
            break
        end = stop
        messages += 1
    return end, messages


def _authority(target: str) -> str:
    return "localhost" if target.startswith("unix:") else target


def _expired() -> ForebayError:
    return ForebayError(Reason.DEADLINE_EXCEEDED, "The deadline passed.")


def _broken() -> ForebayError:
    return ForebayError(Reason.INTERNAL, "The replica failed.")


def _unexpected() -> ForebayError:
    return ForebayError(Reason.INTERNAL, "An unexpected error happened here.")
