"""A starting fleet on a terminal, and what to type once it has started."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forebay_client.fleet.core.state import Fleet, Load, Service, ServiceState

_MARKS = {
    ServiceState.WAITING: ("·", "dim"),
    ServiceState.STARTING: ("…", "yellow"),
    ServiceState.READY: ("✓", "green"),
    ServiceState.EXTERNAL: ("✓", "green"),
    ServiceState.RESTARTING: ("!", "red"),
    ServiceState.STOPPING: ("…", "yellow"),
    ServiceState.STOPPED: ("·", "dim"),
    ServiceState.FAILED: ("✗", "red"),
}
_QUESTION = "What is the capital of France?"


def progress(fleet: Fleet, *, now_unix_s: float) -> RenderableType:
    """One line per service and per load, with seconds."""
    table = Table.grid(padding=(0, 2))
    for service in fleet.services:
        table.add_row(*_service_row(service, now_unix_s))
    for load in fleet.loads:
        table.add_row(*_load_row(load, now_unix_s))
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in fleet.warnings]
    return Group(*warnings, table)


def _service_row(service: Service, now_unix_s: float) -> tuple[Text, Text, Text, Text]:
    mark, style = _MARKS[service.state]
    if service.state is ServiceState.READY and service.started_in_s is not None:
        seconds, said = service.started_in_s, service.address
    else:
        seconds, said = now_unix_s - service.since_unix_s, str(service.state)
    if service.detail:
        said += f" ({service.detail})"
    return (
        Text(mark, style=style),
        Text(service.name),
        Text(f"{max(0.0, seconds):.1f} s", style="dim"),
        Text(said, style="dim"),
    )


def _load_row(load: Load, now_unix_s: float) -> tuple[Text, Text, Text, Text]:
    state = {"active": ServiceState.READY, "failed": ServiceState.FAILED}
    mark, style = _MARKS[state.get(load.state, ServiceState.STARTING)]
    phases = Text(" · ".join(f"{one.phase} {one.seconds:.1f}" for one in load.phases), style="dim")
    seconds = sum(one.seconds for one in load.phases)
    if load.phase:
        current = max(0.0, now_unix_s - load.since_unix_s)
        seconds += current
        phases.append(" · " if load.phases else "")
        phases.append(f"{load.phase} {current:.1f}", style="not dim bold")
    elif not load.phases:
        phases = Text(load.state, style="dim")
    return (
        Text(mark, style=style),
        Text(f"{load.model_version} on {load.replica_id}"),
        Text(f"{seconds:.1f} s", style="dim"),
        phases,
    )


def quick_start(fleet: Fleet, *, command: str) -> RenderableType:
    """Addresses, and first prompts to copy; `command` is how `forebay` is called here."""
    base = f"http://{fleet.http_address}/v1"
    table = Table.grid(padding=(0, 2))
    table.add_row("OpenAI", base)
    table.add_row("gRPC", fleet.grpc_address)
    table.add_row("model", ", ".join(filter(None, (fleet.model, fleet.embedding_model))))
    shell = (
        f'{command} chat "{_QUESTION}"\n'
        f"curl {base}/chat/completions \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{fleet.model}", "messages": [\n'
        f'       {{"role": "user", "content": "{_QUESTION}"}}]}}\''
    )
    python = (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{base}", api_key="none")\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{fleet.model}",\n'
        f'    messages=[{{"role": "user", "content": "{_QUESTION}"}}],\n'
        ")\n"
        "print(answer.choices[0].message.content)"
    )
    return Group(table, "", _copyable(shell), "", _copyable(python))


def _copyable(code: str) -> RenderableType:
    # No frame, no padding, nothing cut off: what is marked with the mouse can be pasted.
    return Text(code, style="cyan", no_wrap=True, overflow="ignore")
