"""How an explanation reads."""

from __future__ import annotations

from forebay.router.v1 import router_service_pb2 as pb
from forebay_client.cli.why import render
from rich.console import Console


def shown(answer: pb.ExplainRequestResponse) -> str:
    console = Console(width=120, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render(answer))
    return capture.get()


def test_a_request_that_was_resumed() -> None:
    answer = pb.ExplainRequestResponse(
        request_id="req-1",
        requested_model="chat",
        model_version="chat@2",
        via="split",
        outcome="succeeded",
        duration_ms=2345,
        prompt_tokens=1200,
        waits=[pb.Wait(what="model", waited_ms=1500, detail="weights")],
        attempts=[
            pb.Attempt(
                replica_id="r1",
                kind="first",
                outcome="REPLICA_LOST",
                first_message_ms=80,
                predicted_ms=70,
                candidates=[
                    pb.Candidate(
                        replica_id="r1", cost=70, queue_ms=30, prefill_ms=40, cached_tokens=800
                    ),
                    pb.Candidate(replica_id="r2", cost=95.5, queue_ms=5, prefill_ms=90.5),
                    pb.Candidate(replica_id="r3", excluded_reason="ejected"),
                ],
                excluded={"ejected": 1, "draining": 2},
                placeable=5,
            ),
            pb.Attempt(replica_id="r2", kind="resume", outcome="succeeded"),
        ],
    )
    text = shown(answer)
    assert "chat → chat@2 (split)" in text
    assert "1.50 s for model (weights)" in text
    assert "succeeded after 2.35 s" in text or "succeeded after 2.34 s" in text
    assert (
        "attempt 1 on r1: REPLICA_LOST, first token after 80.0 ms, 70.0 ms were predicted" in text
    )
    [row] = [line for line in text.splitlines() if "chosen" in line]
    assert row.split() == [
        *("r1", "70.0", "ms", "30.0", "ms", "40.0", "ms", "0.0", "ms", "800", "tokens"),
        *("←", "chosen"),
    ]
    assert "r3" in text and "answered with faults" in text
    assert "3 more could have taken it" in text
    assert "2 excluded: is being drained" in text
    assert "attempt 2 (resume) on r2: succeeded" in text


def test_a_request_that_was_refused() -> None:
    answer = pb.ExplainRequestResponse(request_id="r", outcome="RATE_LIMITED")
    text = shown(answer)
    assert "RATE_LIMITED" in text
    assert "not sent to any replica" in text
    assert "still running" in shown(pb.ExplainRequestResponse(request_id="r"))
