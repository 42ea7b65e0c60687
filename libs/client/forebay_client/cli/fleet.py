"""`forebay up` and `forebay down`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click
from forebay_common import config as configs
from rich.console import Console
from rich.live import Live

from forebay_client.cli.progress_view import progress, quick_start
from forebay_client.cli.where import state_dir_option
from forebay_client.fleet import launch
from forebay_client.fleet.config import PREFIX, Config, drain_timeout_s
from forebay_client.fleet.core import plan
from forebay_client.fleet.core.progress import news
from forebay_client.fleet.core.state import Fleet, Phase
from forebay_client.fleet.directory import Directory
from forebay_client.fleet.launch import FleetError

_CONTEXT_TOKENS = 2048
_MAX_SEQUENCES = 64
_KV_CACHE_BYTES = 1 << 30
SIMULATED = "simulated"
SMOLLM2 = "smollm2"
MINILM = "minilm"


@click.command()
@click.option(
    "--model",
    default=SMOLLM2,
    show_default=True,
    metavar="smollm2|simulated|PATH",
    help="A small real chat model, made ready when it is missing; a simulated one, which needs no "
    "vLLM; or the directory of a safetensors model.",
)
@click.option(
    "--profile",
    metavar="NAME",
    default="paced",
    show_default=True,
    help="Step times of the simulated model: paced, instant, or a device and model.",
)
@click.option("--embeddings", is_flag=True, help="Also load a small embedding model.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    metavar="N",
    default=1,
    show_default=True,
    help="Fewest active replicas.",
)
@click.option(
    "--max",
    "max_replicas",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Most replicas, warm ones included.  [default: 1 for a real model, because a second one "
    "would share the same cores; 3 for a simulated one]",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 64),
    metavar="N",
    help="Loaded replicas kept in waiting.  [default: 0 for a real model, 1 for a simulated one]",
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8080,
    show_default=True,
    help="Where the OpenAI protocol is served; 0 takes any free port.",
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=7070,
    show_default=True,
    help="Where gRPC is served; 0 takes any free port.",
)
@click.option(
    "--etcd",
    "etcd_endpoints",
    multiple=True,
    metavar="HOST:PORT",
    help="Use this etcd instead of a throw-away one; may be given several times.",
)
@click.option(
    "--namespace",
    metavar="PREFIX",
    default="/forebay",
    show_default=True,
    help="Prefix of every key in etcd; one per fleet that shares an etcd.",
)
@click.option("--foreground", is_flag=True, help="Stay until Ctrl-C, then stop the fleet.")
@state_dir_option
def up(
    *,
    directory: Directory,
    model: str,
    profile: str,
    embeddings: bool,
    replicas: int,
    max_replicas: int | None,
    warm: int | None,
    http_port: int,
    grpc_port: int,
    etcd_endpoints: tuple[str, ...],
    namespace: str,
    foreground: bool,
) -> None:
    """Start a fleet on this machine: etcd, registry, router, autoscaler, and replicas.

    The fleet runs in the background until `forebay down`. Every process listens on loopback only.
    """
    console = Console(highlight=False)
    silence_s = _config().silence_s
    fleet = launch.running(directory)
    if fleet is not None and fleet.phase is Phase.READY:
        console.print(f"already running since {_since(fleet)} (`forebay down` stops it)")
        console.print(quick_start(fleet, command=_command()), soft_wrap=True)
        return
    if fleet is not None and fleet.phase is Phase.STARTING:
        console.print("already starting")
        _follow(console, launch.follow_start(directory, None, silence_s=silence_s))
        return
    if fleet is not None:
        raise FleetError(f"the fleet is {fleet.phase}; wait a moment, or see `forebay status`")
    simulated = model == SIMULATED
    options = plan.Options(
        models=_models(directory, model, profile, embeddings=embeddings),
        replicas=replicas,
        max_replicas=_most(replicas, max_replicas, warm, simulated=simulated),
        warm=_warm(warm, simulated=simulated),
        grpc_port=grpc_port,
        http_port=http_port,
        etcd_endpoints=tuple(
            one.strip() for text in etcd_endpoints for one in text.split(",") if one.strip()
        ),
        namespace=namespace,
    )
    launch.check_ports(options)
    if ended := launch.clear_leftovers(directory):
        console.print(f"ended {ended} processes that an earlier run left behind")
    directory.create()
    for name, embeds in ((SMOLLM2, False), (MINILM, True)):
        wanted = [m for m in options.models if m.artifact_path == str(directory.models / name)]
        if wanted and wanted[0].embeds == embeds:
            launch.prepare(
                name,
                directory.models / name,
                lambda line: console.print(line, markup=False),
                log=directory.log("prepare"),
            )
    process = launch.launch(directory, options, foreground=foreground)
    try:
        _follow(console, launch.follow_start(directory, process, silence_s=silence_s))
    except KeyboardInterrupt:
        console.print("stopping what was started")
        _stop(directory)
        raise
    except FleetError:
        _stop(directory)
        raise
    if foreground:
        sys.exit(_stay(console, process))


@click.command()
@state_dir_option
def down(directory: Directory) -> None:
    """Stop the local fleet, and whatever one that was killed has left behind."""
    console = Console(highlight=False)
    began_s = time.monotonic()
    fleet = launch.running(directory)
    if fleet is None:
        ended = launch.clear_leftovers(directory)
        console.print(f"ended {ended} left-over processes" if ended else "no fleet is running")
        return
    _show(console, _stopping(directory, fleet), since=fleet)
    console.print(f"stopped in {time.monotonic() - began_s:.1f} s")


def _models(
    directory: Directory, model: str, profile: str, *, embeddings: bool
) -> tuple[plan.ModelPlan, ...]:
    if model == SIMULATED:
        chat = plan.ModelPlan(SIMULATED, "simulated", profile=profile)
        embed = plan.ModelPlan("simulated-embed", "simulated", profile=profile, embeds=True)
    else:
        chat = _real(directory, model)
        embed = plan.ModelPlan(
            MINILM, "vllm", artifact_path=str(directory.models / MINILM), embeds=True
        )
    return (chat, embed) if embeddings else (chat,)


def _real(directory: Directory, model: str) -> plan.ModelPlan:
    if model == SMOLLM2:
        path, context_tokens = directory.models / SMOLLM2, _CONTEXT_TOKENS
    else:
        path, context_tokens = Path(model).resolve(), 0
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise FleetError(
                f"--model {model}: neither smollm2, simulated, nor a directory with config.json "
                "and *.safetensors"
            )
    return plan.ModelPlan(
        plan.model_name(path.name),
        "vllm",
        artifact_path=str(path),
        context_tokens=context_tokens,
        max_sequences=_MAX_SEQUENCES,
        kv_cache_bytes=_KV_CACHE_BYTES,
    )


def _warm(warm: int | None, *, simulated: bool) -> int:
    if warm is None:
        return 1 if simulated else 0
    return warm


def _most(replicas: int, most: int | None, warm: int | None, *, simulated: bool) -> int:
    needed = replicas + _warm(warm, simulated=simulated)
    if most is None:
        return max(needed, 3 if simulated else 1)
    if most < needed:
        raise FleetError(f"--max {most} is less than --replicas and --warm together ({needed})")
    return most


def _follow(console: Console, states: Iterator[Fleet]) -> None:
    began_s = time.monotonic()
    fleet = _show(console, states)
    assert fleet is not None, "a start ends with a state or raises"
    console.print(f"ready in {time.monotonic() - began_s:.1f} s")
    console.print(quick_start(fleet, command=_command()), soft_wrap=True)


def _show(console: Console, states: Iterator[Fleet], *, since: Fleet | None = None) -> Fleet | None:
    """Show states as they come: live on a terminal, else one line per thing that happened since a
    known state."""
    last = since
    if not console.is_terminal:
        for fleet in states:
            for line in news(last, fleet):
                console.print(line, markup=False, soft_wrap=True)
            last = fleet
        return last
    with Live(console=console, refresh_per_second=8) as live:
        for fleet in states:
            live.update(progress(fleet, now_unix_s=time.time()))
            last = fleet
    return last


def _stop(directory: Directory) -> None:
    fleet = launch.running(directory)
    if fleet is None:
        launch.clear_leftovers(directory)
        return
    for _ in _stopping(directory, fleet):
        pass


def _stopping(directory: Directory, fleet: Fleet) -> Iterator[Fleet]:
    config = _config()
    # Four services, one after the other, and two steps each, at the very worst.
    timeout_s = 8 * (drain_timeout_s(os.environ) + config.stop_timeout_s) + 10
    return launch.follow_stop(directory, fleet, timeout_s=timeout_s, silence_s=config.silence_s)


def _config() -> Config:
    return configs.load(Config, PREFIX, os.environ)


def _stay(console: Console, process: subprocess.Popen[bytes]) -> int:
    """Wait for the supervisor, passing on what asks us to stop."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)

    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)
    }
    console.print("Ctrl-C stops the fleet")
    status = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    console.print("stopped")
    return status


def _command() -> str:
    """How this command is called from here."""
    called = Path(sys.argv[0])
    if shutil.which(called.name) == str(called.resolve()):
        return called.name
    return os.path.relpath(called)


def _since(fleet: Fleet) -> str:
    return time.strftime("%H:%M:%S", time.localtime(fleet.started_unix_s))
