"""etcd's members: a channel to each, one in use, another found when it fails.

A member is in use only after it answered a linearizable read, so one that is cut off from its
quorum is passed over. What may have reached a member is sent again only if it is repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from aetcd import rpc

from forebay_common.errors import ForebayError, Reason

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A member that has lost its quorum ends streams that carry this, instead of staying silent.
REQUIRE_LEADER: Final = (("hasleader", "true"),)
# etcd answers pings more frequent than every 5 s with GOAWAY (`--grpc-keepalive-min-time`), and
# counts those of a channel without calls as abuse.
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class LeaseNotFoundError(ForebayError):
    """The lease has expired or was revoked; a new one must be granted."""

    def __init__(self) -> None:
        super().__init__(Reason.STORE_UNAVAILABLE, "The lease has expired; try again.")


class Member:
    """A connection to one etcd member, and the calls on it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(_target(endpoint), options=_OPTIONS)
        self.kv: Any = rpc.KVStub(self._channel)
        self.lease: Any = rpc.LeaseStub(self._channel)
        self.watch: Any = rpc.WatchStub(self._channel)
        self._calls: set[Any] = set()
        self._heard_at = time.monotonic()
        self._cut = False

    def is_connected(self) -> bool:
        """Whether a call would be sent at once. If not, the channel starts to connect."""
        return self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def heard(self) -> None:
        """Note that an answer came over this connection."""
        self._heard_at = time.monotonic()

    def is_silent(self, for_s: float) -> bool:
        """Whether it counts as connected, but nothing came over it for so long."""
        return time.monotonic() - self._heard_at >= for_s and self.is_connected()

    @contextmanager
    def hold(self, call: Any) -> Iterator[Any]:
        """Own a gRPC call: it is cancelled on leaving, if it has not ended, and by `cut`."""
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            call.cancel()

    async def cut(self) -> None:
        """End every call and the connection."""
        self._cut = True
        # Closing the channel does not end all of them.
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()

    def was_cut(self) -> bool:
        """Whether a CancelledError comes from `cut`, not from a cancellation of this task."""
        task = asyncio.current_task()
        return self._cut and (task is None or task.cancelling() == 0)


class Members:
    """Chooses the member that calls go to."""

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float, silence_s: float) -> None:
        """A call may take `timeout_s`. A connection over which nothing came for `silence_s` is
        replaced when a call on it fails: a dead one can look alive for as long as it exists."""
        if not endpoints:
            raise ValueError("at least one etcd endpoint is needed")
        self._members = [Member(endpoint) for endpoint in dict.fromkeys(endpoints)]
        self._current = self._members[0] if len(self._members) == 1 else None
        self._choosing = asyncio.Lock()
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Ends every call with STORE_UNAVAILABLE and closes the connections."""
        self._closed = True
        for member in self._members:
            await member.cut()

    async def unary(
        self, method: Callable[[Member], Any], request: Any, *, repeatable: bool
    ) -> Any:
        """Send one request to a method of a member that works."""

        async def send(member: Member, timeout_s: float) -> Any:
            call = method(member)(request, timeout=timeout_s, wait_for_ready=True)
            with member.hold(call):
                return await call

        return await self.call(send, repeatable=repeatable)

    async def call(
        self,
        send: Callable[[Member, float], Awaitable[T]],
        *,
        repeatable: bool,
        timeout_s: float | None = None,
    ) -> T:
        """Make one exchange with a member that works, given the seconds it may take.

        STORE_UNAVAILABLE for a call that is not repeatable means that it was perhaps carried out.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        tries_left = 2 if repeatable else 1
        while True:
            member = await self.choose(deadline)
            # Where there is nobody else to ask, one slow answer is better than two short waits.
            shares = tries_left if len(self._members) > 1 else 1
            share_s = max(0.001, (deadline - time.monotonic()) / shares)
            tries_left -= 1
            try:
                answer = await send(member, share_s)
                member.heard()
                return answer
            except (grpc.aio.AioRpcError, grpc.aio.BaseError) as error:
                failure = to_error(error)
                if failure.reason is not Reason.STORE_UNAVAILABLE or isinstance(
                    failure, LeaseNotFoundError
                ):
                    member.heard()
                    raise failure from error
                await self.suspect(member)
                if tries_left == 0 or time.monotonic() >= deadline:
                    raise failure from error
            except asyncio.CancelledError:
                if member.was_cut():
                    raise unavailable() from None
                raise

    async def choose(self, deadline: float) -> Member:
        """The member in use, or the first of all to answer. `deadline` is in monotonic seconds."""
        if self._closed:
            raise unavailable()
        if (member := self._usable()) is not None:
            return member
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._choosing:
                if (member := self._usable()) is None:
                    member = await self._first_to_answer(deadline)
                    self._current = member
                return member
        except TimeoutError:
            raise unavailable() from None

    async def suspect(self, member: Member) -> None:
        """Stop using a member that failed until it answers again, on a new connection if the old
        one is silent."""
        if len(self._members) > 1 and self._current is member:
            self._current = None
        if self._closed or member not in self._members or not member.is_silent(self._silence_s):
            return
        _log.warning("the connection to %s is silent and is replaced", member.endpoint)
        fresh = Member(member.endpoint)
        self._members[self._members.index(member)] = fresh
        if self._current is member:
            self._current = fresh
        await member.cut()

    def _usable(self) -> Member | None:
        current = self._current
        if current is None or len(self._members) == 1 or current.is_connected():
            return current
        return None

    async def _first_to_answer(self, deadline: float) -> Member:
        probes = {
            asyncio.create_task(self._answers(member, deadline)): member for member in self._members
        }
        waiting = set(probes)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for probe in done:
                    if not probe.cancelled() and probe.result():
                        return probes[probe]
        finally:
            for probe in waiting:
                probe.cancel()
            if waiting:
                await asyncio.wait(waiting)
        raise unavailable()

    async def _answers(self, member: Member, deadline: float) -> bool:
        left_s = max(0.001, deadline - time.monotonic())
        request = rpc.RangeRequest(key=b"\0")
        try:
            call = member.kv.Range(request, timeout=left_s, wait_for_ready=True)
            with member.hold(call):
                await call
        except (grpc.aio.AioRpcError, grpc.aio.BaseError):
            await self.suspect(member)
            return False
        member.heard()
        return True


def unavailable() -> ForebayError:
    """What a caller sees while etcd cannot be reached."""
    return ForebayError(Reason.STORE_UNAVAILABLE, "The store cannot be reached; try again.")


def to_error(error: Exception) -> ForebayError:
    """What etcd answered, or the failure of its connection, as the error a caller sees."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return unavailable()
    details = error.details() or ""
    if error.code() is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseNotFoundError()
    # The second comes from gRPC on etcd's side, before etcd can say the first.
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in details:
        return ForebayError(Reason.INVALID_ARGUMENT, f"The store refused the request: {details}.")
    return unavailable()


def _target(endpoint: str) -> str:
    if endpoint.startswith("https://"):
        raise ValueError("etcd over TLS is not supported; give host:port")
    return endpoint.removeprefix("http://").rstrip("/")
