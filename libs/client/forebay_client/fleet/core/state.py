"""What is known of a local fleet, as it stands in `fleet.json`."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from typing import Any

VERSION = 1
"""Of the file's format."""


class Phase(StrEnum):
    """Where a fleet is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ServiceState(StrEnum):
    """Where one of its processes is."""

    WAITING = "waiting"
    """For another one."""
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died, and is started again after a pause."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    EXTERNAL = "external"
    """Somebody else runs it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one with the same number."""

    pid: int
    started: str
    """When it started, by the system's own clock; only good for comparing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """One process of the fleet as the supervisor sees it."""

    name: str
    state: ServiceState
    since_unix_s: float
    """When it came into this state."""
    address: str = ""
    """`host:port` of its gRPC."""
    process: Process | None = None
    started_in_s: float | None = None
    """From its start until it was ready, the last time."""
    restarts: int = 0
    detail: str = ""
    """Why it died, or what is worth knowing about it."""


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """How long one phase of a load took."""

    phase: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """One model version on one replica."""

    replica_id: str
    model_version: str
    state: str
    """As `engine.v1.ModelState`, in lower case: `loading`, `active`, …"""
    phase: str
    """As `engine.v1.LoadPhase`, in lower case; empty when no load is under way."""
    since_unix_s: float
    """When this phase, or this state, began."""
    phases: tuple[PhaseTime, ...] = ()
    """Those that have ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet at one moment."""

    phase: Phase
    supervisor: Process
    started_unix_s: float
    model: str = ""
    """The model to ask first."""
    embedding_model: str = ""
    grpc_address: str = ""
    http_address: str = ""
    etcd_endpoints: tuple[str, ...] = ()
    keeps_spans: bool = True
    """False: the user's own OpenTelemetry back end gets them."""
    reason: str = ""
    """Why it failed."""
    ready_in_s: float | None = None
    warnings: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    loads: tuple[Load, ...] = ()

    def service(self, name: str) -> Service | None:
        """The service of that name."""
        return next((one for one in self.services if one.name == name), None)


def encode(fleet: Fleet) -> str:
    """The text of `fleet.json`."""
    return json.dumps({"version": VERSION, **dataclasses.asdict(fleet)}, indent=1)


def decode(text: str) -> Fleet | None:
    """Read `fleet.json`; None where it is another version's or nobody's."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("version") != VERSION:
            return None
        return Fleet(
            **{
                **fields,
                "phase": Phase(fields["phase"]),
                "supervisor": Process(**fields["supervisor"]),
                "etcd_endpoints": tuple(fields["etcd_endpoints"]),
                "warnings": tuple(fields["warnings"]),
                "services": tuple(_service(one) for one in fields["services"]),
                "loads": tuple(_load(one) for one in fields["loads"]),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _service(fields: dict[str, Any]) -> Service:
    process = fields["process"]
    return Service(
        **{
            **fields,
            "state": ServiceState(fields["state"]),
            "process": None if process is None else Process(**process),
        }
    )


def _load(fields: dict[str, Any]) -> Load:
    return Load(**{**fields, "phases": tuple(PhaseTime(**one) for one in fields["phases"])})
