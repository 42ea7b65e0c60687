"""`forebay models`."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table

from forebay_client.cli.where import address_option, key_option, router_of, state_dir_option
from forebay_client.fleet.directory import Directory
from forebay_client.sync import Client


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@key_option
@address_option
@state_dir_option
def models(
    *, directory: Directory, address: str | None, api_key: str | None, as_json: bool
) -> None:
    """List the models that can be asked, their versions and shares of traffic."""
    with Client(router_of(directory, address), api_key=api_key) as client:
        found = client.models()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(model) for model in found], indent=1))
        return
    if not found:
        click.echo("no models are registered")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("model", "version", "share", "task", "back end", "context", "aliases"):
        table.add_column(title)
    for model in found:
        for version in model.versions:
            table.add_row(
                model.name,
                version.version,
                f"{version.share:.0%}",
                version.task,
                version.backend,
                str(version.context_tokens or "its own"),
                ", ".join(model.aliases),
            )
    Console(highlight=False).print(table)
