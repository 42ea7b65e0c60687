"""`forebay why`."""

from __future__ import annotations

import click
import grpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from google.protobuf import json_format
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay_client.cli.where import address_option, key_option, router_of, state_dir_option
from forebay_client.errors import from_call
from forebay_client.fleet.directory import Directory
from forebay_client.requests import key_metadata

_TIMEOUT_S = 5.0
_EXCLUDED = {
    "model_absent": "does not have the model",
    "model_not_active": "the model is not ready there",
    "standby": "waits to be claimed",
    "draining": "is being drained",
    "down": "was lost",
    "tried": "had failed this request",
    "ejected": "answered with faults",
    "wrong_class": "its pool does not take the class",
    "suspect": "has another suspect",
}


@click.command()
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@key_option
@address_option
@state_dir_option
def why(
    *,
    directory: Directory,
    address: str | None,
    api_key: str | None,
    request_id: str,
    as_json: bool,
) -> None:
    """Show how a request was placed, and why there.

    ID is the request's `x-request-id`. A router remembers its newest requests; with several
    routers, ask the one that answered it (--address).
    """
    router = router_of(directory, address)
    with grpc.insecure_channel(router) as channel:
        try:
            answer = router_rpc.RouterServiceStub(channel).ExplainRequest(
                router_pb.ExplainRequestRequest(request_id=request_id),
                metadata=key_metadata(api_key),
                timeout=_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise from_call(error, router) from None
    if as_json:
        click.echo(json_format.MessageToJson(answer, preserving_proto_field_name=True, indent=1))
    else:
        Console(highlight=False).print(render(answer))


def render(answer: router_pb.ExplainRequestResponse) -> RenderableType:
    """An explanation to read."""
    parts: list[RenderableType] = [_facts(answer)]
    for number, attempt in enumerate(answer.attempts, start=1):
        parts.append(Text())
        parts.append(_headline(number, attempt))
        if attempt.candidates:
            parts.append(Padding(_candidates(attempt), (0, 0, 0, 2)))
        parts.extend(Text(f"  {line}", style="dim") for line in _excluded(attempt))
    if not answer.attempts:
        parts.append(Text("It was not sent to any replica."))
    return Group(*parts)


def _facts(answer: router_pb.ExplainRequestResponse) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    model = answer.requested_model
    if answer.model_version and answer.model_version != model:
        model = f"{model} → {answer.model_version}"
    if answer.via:
        model += f" ({answer.via})"
    facts = [
        ("request", answer.request_id),
        ("model", model),
        ("tier", answer.tier_reason),
        ("tenant", answer.tenant),
        ("class", answer.priority_class),
        ("prompt", f"~{answer.prompt_tokens} tokens" if answer.prompt_tokens else ""),
        ("outcome", _outcome(answer)),
        ("trace", answer.trace_id),
    ]
    for wait in answer.waits:
        detail = f" ({wait.detail})" if wait.detail else ""
        facts.append(("waited", f"{_ms(wait.waited_ms)} for {wait.what}{detail}"))
    for name, value in facts:
        if value:
            table.add_row(name, value)
    return table


def _outcome(answer: router_pb.ExplainRequestResponse) -> str:
    took = f" after {_ms(answer.duration_ms)}" if answer.duration_ms else ""
    return f"{answer.outcome}{took}" if answer.outcome else f"still running{took}"


def _headline(number: int, attempt: router_pb.Attempt) -> Text:
    text = Text(f"attempt {number}", style="bold")
    if attempt.kind and attempt.kind != "first":
        text.append(f" ({attempt.kind})")
    text.append(f" on {attempt.replica_id}: ", style="not bold")
    text.append(attempt.outcome or "runs", style="green" if _is_well(attempt) else "red")
    times = []
    if attempt.HasField("first_message_ms"):
        times.append(f"first token after {_ms(attempt.first_message_ms)}")
    if attempt.predicted_ms:
        times.append(f"{_ms(attempt.predicted_ms)} were predicted")
    if times:
        text.append(f", {', '.join(times)}", style="not bold")
    return text


def _is_well(attempt: router_pb.Attempt) -> bool:
    return attempt.outcome in ("", "succeeded")


def _candidates(attempt: router_pb.Attempt) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("replica")
    for title in ("predicted", "queue", "prefill", "other", "cached"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in attempt.candidates:
        if not one.HasField("cost"):
            table.add_row(one.replica_id, "–", "", "", "", "", _said(one.excluded_reason))
            continue
        chosen = "← chosen" if one.replica_id == attempt.replica_id else ""
        table.add_row(
            one.replica_id,
            _ms(one.cost),
            _ms(one.queue_ms),
            _ms(one.prefill_ms),
            _ms(one.other_ms),
            f"{one.cached_tokens} tokens" if one.cached_tokens else "–",
            chosen,
        )
    return table


def _excluded(attempt: router_pb.Attempt) -> list[str]:
    lines = []
    compared = sum(one.HasField("cost") for one in attempt.candidates)
    if attempt.placeable > compared:
        lines.append(f"{attempt.placeable - compared} more could have taken it")
    for reason, count in sorted(attempt.excluded.items()):
        lines.append(f"{count} excluded: {_said(reason)}")
    return lines


def _said(reason: str) -> str:
    return _EXCLUDED.get(reason, reason)


def _ms(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.1f} ms"
