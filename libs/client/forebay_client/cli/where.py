"""Which fleet a command is about: options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from forebay_client.fleet.core.state import Phase
from forebay_client.fleet.directory import Directory
from forebay_client.fleet.launch import FleetError, running

_F = TypeVar("_F", bound=Callable[..., Any])


def _directory(context: click.Context, option: click.Parameter, value: Path) -> Directory:
    return Directory(value)


def state_dir_option(command: _F) -> _F:
    """Add `--state-dir`; the command gets a `Directory`."""
    return click.option(
        "--state-dir",
        "directory",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(".forebay"),
        envvar="FOREBAY_STATE_DIR",
        show_default=True,
        show_envvar=True,
        callback=_directory,
        help="Where the local fleet keeps its state, logs, spans and models.",
    )(command)


def address_option(command: _F) -> _F:
    """Add `--address`; None means the local fleet's router."""
    return click.option(
        "--address",
        metavar="HOST:PORT",
        envvar="FOREBAY_ADDRESS",
        show_envvar=True,
        help="gRPC of a router elsewhere, instead of the local fleet's.",
    )(command)


def key_option(command: _F) -> _F:
    """Add `--key`; None where the router is open."""
    return click.option(
        "--key",
        "api_key",
        metavar="KEY",
        envvar="FOREBAY_API_KEY",
        show_envvar=True,
        help="API key; better in the environment, where no list of processes shows it.",
    )(command)


def router_of(directory: Directory, address: str | None) -> str:
    """The router to call.

    Raises:
        FleetError: none was named, and no local fleet is ready.
    """
    if address:
        return address
    fleet = running(directory)
    if fleet is None:
        raise FleetError(
            f"no fleet runs in {directory.path}: start one with `forebay up`, or name a router "
            "with --address"
        )
    if fleet.phase is not Phase.READY:
        raise FleetError(f"the fleet is {fleet.phase}; see `forebay status`")
    return fleet.grpc_address
