"""`forebay keys`."""

from __future__ import annotations

import json
import re
import sys
import time

import click
from forebay.router.v1 import key_service_pb2 as pb
from forebay_common.apikeys import new_secret
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from forebay_client.cli.admin import TIMEOUT_S, Admin, admin_options

_SCOPES = {
    "inference": pb.SCOPE_INFERENCE,
    "read": pb.SCOPE_READ,
    "admin": pb.SCOPE_ADMIN,
}
_NAMES = {scope: name for name, scope in _SCOPES.items()}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"([0-9]{1,9})([smhd])")


class Duration(click.ParamType[int]):
    """A time such as 90s, 15m, 12h or 30d, as seconds."""

    name = "TIME"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """See `click.ParamType`."""
        if isinstance(value, int):
            return value
        match = _TIME.fullmatch(str(value))
        if match is None:
            self.fail("must be a number and s, m, h or d, such as 30d", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


@click.group()
def keys() -> None:
    """Make, list, rotate and revoke API keys.

    Each needs an admin's key (--key), or the routers' file of secrets (--secret-file), by which the
    first key is made. All routers follow within seconds.
    """


@keys.command()
@click.argument("tenant")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(list(_SCOPES)),
    multiple=True,
    default=("inference",),
    show_default=True,
    help="What it may be used for; admin holds the others. May be given again.",
)
@click.option(
    "--lifetime", type=Duration(), default=0, help="How long it is good.  [default: ever]"
)
@click.option("--note", default="", metavar="TEXT", help="What it is for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@admin_options
def create(
    *, admin: Admin, tenant: str, scopes: tuple[str, ...], lifetime: int, note: str, as_json: bool
) -> None:
    """Make a key of TENANT. It is shown this once, on standard output, and stored nowhere."""
    request = pb.CreateKeyRequest(
        tenant=tenant, scopes=[_SCOPES[scope] for scope in scopes], lifetime_s=lifetime, note=note
    )
    with admin.calls() as stub:
        answer = stub.CreateKey(request, metadata=admin.metadata, timeout=TIMEOUT_S)
    _show(answer.key, answer.text, as_json=as_json)


@keys.command("list")
@click.option("--tenant", default="", help="Only those of one tenant.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@admin_options
def list_(*, admin: Admin, tenant: str, as_json: bool) -> None:
    """List keys, without their texts."""
    with admin.calls() as stub:
        answer = stub.ListKeys(
            pb.ListKeysRequest(tenant=tenant), metadata=admin.metadata, timeout=TIMEOUT_S
        )
    if as_json:
        click.echo(json.dumps([_to_dict(key) for key in answer.keys], indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("id", "tenant", "scopes", "made", "state", "note"):
        table.add_column(title)
    now = time.time()
    for key in answer.keys:
        scopes = ", ".join(_NAMES.get(scope, "?") for scope in key.scopes)
        table.add_row(
            key.key_id, key.tenant, scopes, _day(key.created_unix_s), _state(key, now), key.note
        )
    Console(highlight=False).print(table)


@keys.command()
@click.argument("key_id", metavar="ID")
@click.option(
    "--overlap",
    type=Duration(),
    default="1d",
    show_default=True,
    help="How long the old key goes on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@admin_options
def rotate(*, admin: Admin, key_id: str, overlap: int, as_json: bool) -> None:
    """Make a key in the place of another, which goes on for a while."""
    with admin.calls() as stub:
        answer = stub.RotateKey(
            pb.RotateKeyRequest(key_id=key_id, overlap_s=overlap),
            metadata=admin.metadata,
            timeout=TIMEOUT_S,
        )
    _show(answer.key, answer.text, as_json=as_json)
    if not as_json:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer.replaced.expires_unix_s))
        click.echo(f"{key_id} goes on until {ends}", err=True)


@keys.command()
@click.argument("key_id", metavar="ID")
@admin_options
def revoke(*, admin: Admin, key_id: str) -> None:
    """End a key for good."""
    with admin.calls() as stub:
        stub.RevokeKey(
            pb.RevokeKeyRequest(key_id=key_id), metadata=admin.metadata, timeout=TIMEOUT_S
        )
    click.echo(f"{key_id} is revoked; routers follow within seconds", err=True)


@keys.command()
def secret() -> None:
    """Make a line for the routers' file of secrets (FOREBAY_ROUTER_KEY_SECRET_FILE)."""
    click.echo(new_secret())


def _show(key: pb.ApiKey, text: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**_to_dict(key), "text": text}, indent=1))
        return
    click.echo(text)
    if sys.stderr.isatty():
        click.echo(
            f"Key {key.key_id} of {key.tenant}. It is not shown again. Use it as\n"
            "  export FOREBAY_API_KEY=…   (forebay)\n"
            "  export OPENAI_API_KEY=…    (OpenAI's clients)",
            err=True,
        )


def _to_dict(key: pb.ApiKey) -> dict[str, object]:
    found = json_format.MessageToDict(key, preserving_proto_field_name=True)
    return {**found, "scopes": [_NAMES.get(scope, "?") for scope in key.scopes]}


def _state(key: pb.ApiKey, now: float) -> str:
    if key.revoked:
        return "revoked"
    if not key.expires_unix_s:
        return "good"
    if key.expires_unix_s <= now:
        return "expired"
    return f"good until {_day(key.expires_unix_s)}"


def _day(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(unix_s))
