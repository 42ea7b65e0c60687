"""`forebay trace`."""

from __future__ import annotations

import json
import os
import time

import click
from rich.console import Console
from rich.table import Table

from forebay_client.cli.where import state_dir_option
from forebay_client.fleet.directory import Directory
from forebay_client.fleet.launch import FleetError, running
from forebay_client.traces.core.waterfall import lay_out
from forebay_client.traces.find import find
from forebay_client.traces.store import SpanReader
from forebay_client.traces.view import render, to_json

_PLAIN_WIDTH = 110


@click.command()
@click.argument("name", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--newest",
    type=click.IntRange(1, 1000),
    metavar="N",
    default=10,
    show_default=True,
    help="How many traces to list.",
)
@state_dir_option
def trace(directory: Directory, name: str | None, as_json: bool, newest: int) -> None:
    """Show where a request's time went.

    ID is a request id or a trace id; without one, the newest traces are listed. Traces outlive the
    fleet that made them.
    """
    if name is None:
        _list(directory, newest, as_json=as_json)
    else:
        show_trace(directory, name, as_json=as_json)


def show_trace(directory: Directory, name: str, *, as_json: bool = False) -> None:
    """Print the waterfall of a request or a trace.

    Raises:
        FleetError: its spans are not here.
    """
    spans = find(directory.spans, name)
    if not spans:
        fleet = running(directory)
        if fleet is not None and not fleet.keeps_spans:
            raise FleetError("the spans went to your own OpenTelemetry back end: look there")
        raise FleetError(f"no trace of {name} in {directory.path}; is it older than what is kept?")
    waterfall = lay_out(spans)
    if as_json:
        click.echo(json.dumps(to_json(waterfall), indent=1))
    else:
        console = Console(highlight=False)
        if not console.is_terminal and not os.environ.get("COLUMNS"):
            # A log or a pipe has no width of its own.
            console.width = _PLAIN_WIDTH
        console.print(render(waterfall))


def _list(directory: Directory, newest: int, *, as_json: bool) -> None:
    try:
        reader = SpanReader(directory.spans)
    except FileNotFoundError:
        raise FleetError(f"no traces are kept in {directory.path}") from None
    try:
        found = reader.newest(newest)
    finally:
        reader.close()
    if as_json:
        listed = [
            {
                "trace_id": one.trace_id,
                "request_id": one.request_id,
                "start_unix_ns": one.start_unix_ns,
                "spans": one.spans,
            }
            for one in found
        ]
        click.echo(json.dumps(listed, indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("started", "request", "trace", "spans"):
        table.add_column(title, no_wrap=True)
    for one in found:
        started = time.strftime("%H:%M:%S", time.localtime(one.start_unix_ns / 1e9))
        table.add_row(started, one.request_id, one.trace_id, str(one.spans))
    Console(highlight=False).print(table)
