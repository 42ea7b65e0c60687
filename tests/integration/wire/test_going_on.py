"""Answers go on elsewhere, attempts race, silence ends them: what a policy can ask of a relay."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason, from_rpc_error
from forebay_wire.policy import (
    Decision,
    Fail,
    Finish,
    Head,
    Outcome,
    Progress,
    Resume,
    Retry,
    Route,
)

from tests.wire_tools import Hops, RecordingPolicy, Script, read_text, until, within

pytestmark = pytest.mark.integration

Follow = Callable[["GoingOn", Head, ForebayError, Progress], Decision]


@dataclasses.dataclass
class GoingOn(RecordingPolicy):
    """Says after each failure what a test wants, with routes as a test wants them."""

    follow: Follow = lambda self, head, error, progress: Fail(error)
    route: dict[str, Any] = dataclasses.field(default_factory=dict)
    rival: str = ""
    """Where a second attempt goes."""
    delivered: list[list[str] | None] = dataclasses.field(default_factory=list)
    """Texts of the messages that had reached the caller, at each failure."""
    dropped: list[tuple[str, Reason | None]] = dataclasses.field(default_factory=list)

    def _route(self, head: Head, *, is_retry: bool = False) -> Route:
        return dataclasses.replace(super()._route(head, is_retry=is_retry), **self.route)

    def again(self, head: Head, message: bytes | None = None) -> Route:
        """The route to the next target."""
        self.targets.pop(0)
        return dataclasses.replace(self._route(head, is_retry=True), message=message)

    def hedge(self, head: Head, route: Route, progress: Progress) -> Route | None:
        return dataclasses.replace(route, target=self.rival, hedge_s=None) if self.rival else None

    def on_dropped(self, head: Head, route: Route, error: ForebayError | None) -> None:
        self.dropped.append((route.target, error.reason if error is not None else None))

    async def on_failure(
        self, head: Head, route: Route, error: ForebayError, progress: Progress
    ) -> Decision:
        self.failures.append(error.reason)
        kept = progress.delivered
        self.delivered.append(None if kept is None else [_text(part) for part in kept])
        return self.follow(self, head, error, progress)


def _text(message: bytes) -> str:
    return pb.GenerateResponse.FromString(message).text_delta


def resume_with(**script: Any) -> Follow:
    """Have the next target answer a script as the continuation."""
    message = Script(**script).request().SerializeToString()
    return lambda self, head, error, progress: Resume(self.again(head, message))


async def failure_of(call: Any) -> ForebayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_text(call)
    return from_rpc_error(caught.value)


async def test_an_answer_goes_on_where_it_was_cut(hops: Hops) -> None:
    first, second = await hops.engine(), await hops.engine("aio")
    policy = GoingOn(
        [first.address, second.address],
        follow=resume_with(count=2, size=3),
        route={"kept_bytes": 1 << 20},
    )
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script(count=3, code="UNAVAILABLE").request())
    assert await within(read_text(call)) == "abc" + "aaabbb"
    assert policy.delivered == [["a", "b", "c"]]
    assert policy.failures == [Reason.REPLICA_LOST]
    ((outcome, reason, progress),) = policy.ends
    assert (outcome, reason, progress.messages) == (Outcome.SUCCEEDED, None, 5)
    # The usage is that of the attempt that succeeded.
    assert dict(await call.trailing_metadata())[md.USAGE] == "1,2,0"
    assert (first.seen.calls, second.seen.calls) == (1, 1)


async def test_a_silent_attempt_is_cut_and_what_it_says_late_is_dropped(hops: Hops) -> None:
    first, second = await hops.engine(), await hops.engine()
    policy = GoingOn(
        [first.address, second.address],
        follow=resume_with(count=1),
        route={"kept_bytes": 1 << 20, "silence_s": 0.2},
    )
    stub = hops.stub(await hops.relay(policy))
    assert await within(read_text(stub.Generate(Script(count=2, hangs=True).request()))) == "aba"
    assert policy.failures == [Reason.REPLICA_LOST]
    await within(first.seen.cancelled.wait())
    assert first.seen.open == 0


async def test_an_attempt_without_a_first_message_is_tried_elsewhere(hops: Hops) -> None:
    first, second = await hops.engine(), await hops.engine()
    policy = GoingOn(
        [first.address, second.address],
        follow=lambda self, head, error, progress: Retry(
            self.again(head, Script(count=2).request().SerializeToString())
        ),
        route={"first_message_s": 0.2},
    )
    stub = hops.stub(await hops.relay(policy))
    began_s = time.monotonic()
    assert await within(read_text(stub.Generate(Script(count=0, hangs=True).request()))) == "ab"
    assert time.monotonic() - began_s >= 0.2
    assert policy.failures == [Reason.REPLICA_LOST]
    await within(first.seen.cancelled.wait())


async def test_an_answer_that_outgrows_what_is_kept_ends_with_its_failure(hops: Hops) -> None:
    first, second = await hops.engine(), await hops.engine()
    policy = GoingOn(
        [first.address, second.address],
        follow=resume_with(count=2),
        route={"kept_bytes": 200},
    )
    stub = hops.stub(await hops.relay(policy))
    error = await within(
        failure_of(stub.Generate(Script(count=5, size=100, code="UNAVAILABLE").request()))
    )
    assert error.reason is Reason.REPLICA_LOST
    assert policy.delivered == [None]
    assert second.seen.calls == 0
    assert [outcome for outcome, _, _ in policy.ends] == [Outcome.FAILED]


async def test_an_answer_of_which_all_was_delivered_is_finished(hops: Hops) -> None:
    engine = await hops.engine()
    told = ((md.USAGE, "7,3,0"),)
    policy = GoingOn(
        [engine.address],
        follow=lambda self, head, error, progress: Finish(told),
        route={"kept_bytes": 1 << 20},
    )
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script(count=3, code="UNAVAILABLE").request())
    assert await within(read_text(call)) == "abc"
    assert dict(await call.trailing_metadata())[md.USAGE] == "7,3,0"
    assert [outcome for outcome, _, _ in policy.ends] == [Outcome.SUCCEEDED]


async def test_one_that_goes_on_may_be_cut_again(hops: Hops) -> None:
    engines = [await hops.engine() for _ in range(3)]
    messages = [
        Script(count=2, code="UNAVAILABLE").request().SerializeToString(),
        Script(count=1, size=2).request().SerializeToString(),
    ]
    policy = GoingOn(
        [engine.address for engine in engines],
        follow=lambda self, head, error, progress: Resume(self.again(head, messages.pop(0))),
        route={"kept_bytes": 1 << 20},
    )
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script(count=1, code="UNAVAILABLE").request())
    assert await within(read_text(call)) == "a" + "ab" + "aa"
    assert policy.delivered == [["a"], ["a", "a", "b"]]
    assert len(policy.ends) == 1


async def test_the_slower_of_two_attempts_is_cancelled(hops: Hops) -> None:
    slow, fast = await hops.engine(), await hops.engine()
    policy = GoingOn([slow.address], rival=fast.address, route={"hedge_s": 0.1})
    stub = hops.stub(await hops.relay(policy))
    # The slow one says nothing for far longer than the other takes for all.
    call = stub.Generate(Script(count=3, gap_s=0.3).request())
    slow.seen.called.clear()
    assert await within(read_text(call)) == "abc"
    assert slow.seen.calls == fast.seen.calls == 1
    loser = fast if policy.dropped[0][0] == fast.address else slow
    await within(loser.seen.cancelled.wait())
    await until(lambda: slow.seen.open + fast.seen.open == 0)
    assert policy.dropped == [(loser.address, None)]
    assert [outcome for outcome, _, _ in policy.ends] == [Outcome.SUCCEEDED]
    assert policy.failures == []


async def test_who_answers_in_time_gets_no_rival(hops: Hops) -> None:
    engine, other = await hops.engine(), await hops.engine()
    policy = GoingOn([engine.address], rival=other.address, route={"hedge_s": 5.0})
    stub = hops.stub(await hops.relay(policy))
    assert await within(read_text(stub.Generate(Script(count=2).request()))) == "ab"
    assert other.seen.calls == 0
    assert policy.dropped == []


async def test_a_first_attempt_that_fails_leaves_the_call_to_its_rival(hops: Hops) -> None:
    engine = await hops.engine()
    # Nobody is there; the connection is tried for longer than the rival waits.
    policy = GoingOn(["127.0.0.1:1"], rival=engine.address, route={"hedge_s": 0.0001})
    stub = hops.stub(await hops.relay(policy))
    call = stub.Generate(Script(count=2).request())
    try:
        text = await within(read_text(call))
    except grpc.aio.AioRpcError as error:
        # The refusal was faster than the rival: then it is the only attempt there was.
        assert from_rpc_error(error).reason is Reason.REPLICA_LOST
        assert engine.seen.calls == 0
    else:
        assert text == "ab"
        assert policy.dropped == [("127.0.0.1:1", Reason.REPLICA_LOST)]
    assert len(policy.ends) == 1


async def test_what_was_delivered_is_told_at_the_end_where_it_is_wanted(hops: Hops) -> None:
    engine = await hops.engine()
    for tells in (True, False):
        policy = GoingOn([engine.address], route={"kept_bytes": 1 << 20, "tells_delivered": tells})
        stub = hops.stub(await hops.relay(policy))
        assert await within(read_text(stub.Generate(Script(count=3).request()))) == "abc"
        await within(policy.ended.wait())
        ((_, _, progress),) = policy.ends
        told = None if progress.delivered is None else [_text(each) for each in progress.delivered]
        assert told == (["a", "b", "c"] if tells else None)
