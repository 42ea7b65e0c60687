"""`forebay status`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import click
import grpc
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler_pb
from forebay.autoscaler.v1 import autoscaler_service_pb2_grpc as autoscaler_rpc
from forebay.router.v1 import router_service_pb2 as router_pb
from forebay.router.v1 import router_service_pb2_grpc as router_rpc
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay_client.cli.where import address_option, key_option, state_dir_option
from forebay_client.errors import from_call
from forebay_client.fleet.core.state import Fleet, Phase, ServiceState
from forebay_client.fleet.directory import Directory
from forebay_client.fleet.launch import running
from forebay_client.requests import key_metadata

_TIMEOUT_S = 3.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@key_option
@address_option
@state_dir_option
def status(
    *, directory: Directory, address: str | None, api_key: str | None, as_json: bool
) -> None:
    """Show the fleet: its services, replicas and pools.

    The exit status is 1 when it is not ready.
    """
    fleet = None if address else running(directory)
    if fleet is None and not address:
        if as_json:
            click.echo(json.dumps({"phase": Phase.STOPPED.value}))
        else:
            click.echo(f"no fleet runs in {directory.path}")
        sys.exit(1)
    problems: list[str] = []
    router = address or (fleet.grpc_address if fleet else "")
    replicas = _replicas(router, api_key, problems) if router else []
    autoscaler = fleet.service("autoscaler") if fleet else None
    pools = _pools(autoscaler.address, problems) if autoscaler else []
    if as_json:
        click.echo(json.dumps(_to_json(fleet, router, replicas, pools, problems), indent=1))
    else:
        _print(fleet, router, replicas, pools, problems)
    if problems or (fleet is not None and fleet.phase is not Phase.READY):
        sys.exit(1)


def _replicas(address: str, api_key: str | None, problems: list[str]) -> list[dict[str, Any]]:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = router_rpc.RouterServiceStub(channel).ListReplicas(
                router_pb.ListReplicasRequest(), metadata=key_metadata(api_key), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            problems.append(f"router: {from_call(error, address)}")
            return []
    return [_to_dict(routed) for routed in answer.replicas]


def _pools(address: str, problems: list[str]) -> list[dict[str, Any]]:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = autoscaler_rpc.AutoscalerServiceStub(channel).ListPools(
                autoscaler_pb.ListPoolsRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            problems.append(f"autoscaler: {from_call(error, address)}")
            return []
    return [_to_dict(pool) for pool in answer.pools]


def _to_dict(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def _to_json(
    fleet: Fleet | None,
    router: str,
    replicas: list[dict[str, Any]],
    pools: list[dict[str, Any]],
    problems: list[str],
) -> dict[str, Any]:
    described: dict[str, Any] = {}
    if fleet is not None:
        described = dataclasses.asdict(fleet)
        del described["loads"]
    return {
        **described,
        "phase": fleet.phase.value if fleet else "",
        "grpc_address": router,
        "replicas": replicas,
        "pools": pools,
        "problems": problems,
    }


def _print(
    fleet: Fleet | None,
    router: str,
    replicas: list[dict[str, Any]],
    pools: list[dict[str, Any]],
    problems: list[str],
) -> None:
    console = Console(highlight=False)
    if fleet is not None:
        up_s = time.time() - fleet.started_unix_s
        console.print(
            f"[bold]{fleet.phase}[/bold] for {_duration(up_s)}  gRPC {router}  "
            f"OpenAI http://{fleet.http_address}/v1"
        )
        for warning in fleet.warnings:
            console.print(f"warning: {warning}", style="yellow", markup=False)
        console.print(_services_table(fleet))
    console.print(_replicas_table(replicas))
    if pools:
        console.print(_pools_table(pools))
    for problem in problems:
        console.print(problem, style="red", markup=False)


def _services_table(fleet: Fleet) -> Table:
    table = _table("service", "state", "pid", "restarts", "address", "")
    for service in fleet.services:
        good = service.state in (ServiceState.READY, ServiceState.EXTERNAL)
        table.add_row(
            service.name,
            Text(str(service.state), style="green" if good else "red"),
            str(service.process.pid) if service.process else "",
            str(service.restarts),
            service.address,
            service.detail,
        )
    return table


def _replicas_table(replicas: list[dict[str, Any]]) -> Table:
    table = _table("replica", "role", "model", "state", "queued", "running", "slots", "KV", "")
    for routed in replicas:
        replica = routed["replica"]
        for model in replica["models"] or [{}]:
            loading = model.get("phase", "LOAD_PHASE_UNSPECIFIED")
            state = _word(model.get("state", ""), "MODEL_STATE_")
            if state == "loading" and not loading.endswith("_UNSPECIFIED"):
                state += f" ({_word(loading, 'LOAD_PHASE_')})"
            table.add_row(
                replica["replica_id"],
                _word(replica["role"], "ROLE_"),
                model.get("model_version", ""),
                Text(state, style="green" if state == "active" else "yellow"),
                str(model.get("queued", "")),
                str(model.get("in_flight", "")),
                str(model.get("slots", "")),
                f"{model.get('kv_cache_usage', 0):.0%}",
                routed["excluded_reason"],
            )
    if not replicas:
        table.add_row("none", *[""] * 8)
    return table


def _pools_table(pools: list[dict[str, Any]]) -> Table:
    table = _table("pool", "active", "warm", "starting", "draining", "bounds", "newest decision")
    for status_ in pools:
        pool, decision = status_["pool"], status_.get("decision") or {}
        table.add_row(
            pool["name"],
            str(status_["active"]),
            str(status_["standby"]),
            str(status_["starting"]),
            str(status_["draining"]),
            f"{pool['min_replicas']}–{pool['max_replicas']}",
            f"{decision.get('desired', '')} {decision.get('reason', '')}".strip(),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title)
    return table


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"
