"""`forebay tenants`."""

from __future__ import annotations

import json

import click
from forebay.router.v1 import key_service_pb2 as pb
from forebay_common.metadata import CLASSES
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from forebay_client.cli.admin import TIMEOUT_S, Admin, admin_options

_LIMITS = tuple(field.name for field in pb.TenantLimits.DESCRIPTOR.fields)


@click.group()
def tenants() -> None:
    """Say who may ask, which models, in which classes, and how much.

    Each needs an admin's key (--key), or the routers' file of secrets (--secret-file).
    """


@tenants.command("set")
@click.argument("name")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATTERN",
    help="Name it may ask; * is any text. May be given again.  [default: all]",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    type=click.Choice(CLASSES),
    help="Class it may ask in. May be given again.  [default: all]",
)
@click.option("--requests-per-min", type=click.IntRange(0), help="Over all models.")
@click.option("--tokens-per-min", type=click.IntRange(0), help="Of prompts and answers.")
@click.option("--concurrent", type=click.IntRange(0), help="Requests at once.")
@click.option("--request-burst", type=click.IntRange(1), help="Requests at once after a pause.")
@click.option("--token-burst", type=click.IntRange(1), help="Tokens at once after a pause.")
@click.option(
    "--limit-model",
    "model_limits",
    type=(str, str),
    multiple=True,
    metavar="NAME LIMITS",
    help="Limits of one model besides, such as `chat requests_per_min=60,concurrent=4`.",
)
@click.option("--weight", type=click.IntRange(1, 1000), default=1, show_default=True)
@admin_options
def set_(
    *,
    admin: Admin,
    name: str,
    models: tuple[str, ...],
    classes: tuple[str, ...],
    model_limits: tuple[tuple[str, str], ...],
    weight: int,
    **limits: int | None,
) -> None:
    """Make tenant NAME, or replace it: what is not given is not limited."""
    tenant = pb.Tenant(name=name, models=models, priority_classes=classes, weight=weight)
    for field, value in limits.items():
        if value is not None:
            setattr(tenant.limits, field, value)
    for model, text in model_limits:
        _read_limits(text, tenant.model_limits[model])
    with admin.calls() as stub:
        stub.PutTenant(
            pb.PutTenantRequest(tenant=tenant), metadata=admin.metadata, timeout=TIMEOUT_S
        )
    click.echo(f"tenant {name} is set; routers follow within seconds", err=True)


@tenants.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@admin_options
def list_(*, admin: Admin, as_json: bool) -> None:
    """List tenants."""
    with admin.calls() as stub:
        answer = stub.ListTenants(
            pb.ListTenantsRequest(), metadata=admin.metadata, timeout=TIMEOUT_S
        )
    if as_json:
        found = [
            json_format.MessageToDict(tenant, preserving_proto_field_name=True)
            for tenant in answer.tenants
        ]
        click.echo(json.dumps(found, indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("tenant", "models", "classes", "weight", "limits"):
        table.add_column(title)
    for tenant in answer.tenants:
        lines = [_limits(tenant.limits)] if tenant.HasField("limits") else []
        lines += [f"{model}: {_limits(each)}" for model, each in tenant.model_limits.items()]
        table.add_row(
            tenant.name,
            ", ".join(tenant.models) or "all",
            ", ".join(tenant.priority_classes) or "all",
            str(tenant.weight or 1),
            "\n".join(lines) or "none",
        )
    Console(highlight=False).print(table)


@tenants.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@admin_options
def delete(*, admin: Admin, name: str, yes: bool) -> None:
    """Remove a tenant; its keys are good for nothing from then on."""
    if not yes:
        click.confirm(f"Remove {name}, and with it the use of its keys?", abort=True, err=True)
    with admin.calls() as stub:
        stub.DeleteTenant(
            pb.DeleteTenantRequest(name=name), metadata=admin.metadata, timeout=TIMEOUT_S
        )


def _read_limits(text: str, limits: pb.TenantLimits) -> None:
    for part in text.split(","):
        field, _, value = part.partition("=")
        if field not in _LIMITS or not value.isdecimal():
            known = ", ".join(_LIMITS)
            raise click.UsageError(f"--limit-model: '{part}' must be NAME=NUMBER of {known}.")
        setattr(limits, field, int(value))


def _limits(limits: pb.TenantLimits) -> str:
    return ", ".join(f"{value} {field.name}" for field, value in limits.ListFields())
