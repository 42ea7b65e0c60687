"""What there is to say about a fleet that starts or stops, one line per thing that happened."""

from __future__ import annotations

from collections.abc import Iterator

from forebay_client.fleet.core.state import Fleet, Load, Service, ServiceState

_SAID = frozenset(
    {ServiceState.READY, ServiceState.RESTARTING, ServiceState.FAILED, ServiceState.EXTERNAL}
)


def news(before: Fleet | None, now: Fleet) -> Iterator[str]:
    """What has happened between two moments, as plain lines."""
    said = set(before.warnings) if before else set()
    yield from (f"warning: {warning}" for warning in now.warnings if warning not in said)
    for service in now.services:
        earlier = before.service(service.name) if before else None
        is_new = earlier is None or (earlier.state, earlier.restarts) != (
            service.state,
            service.restarts,
        )
        if is_new and service.state in _SAID:
            yield describe_service(service)
    earlier_loads = {_key(load): load for load in before.loads} if before else {}
    for load in now.loads:
        before_load = earlier_loads.get(_key(load))
        if before_load is None or (before_load.state, before_load.phase) != (
            load.state,
            load.phase,
        ):
            yield describe_load(load)


def describe_service(service: Service) -> str:
    """One line about a service."""
    if service.state is ServiceState.READY and service.started_in_s is not None:
        line = f"{service.name}: ready after {service.started_in_s:.1f} s on {service.address}"
    else:
        line = f"{service.name}: {service.state}"
    return f"{line} ({service.detail})" if service.detail else line


def describe_load(load: Load) -> str:
    """One line about a model on a replica."""
    ended = ", ".join(f"{one.phase} {one.seconds:.1f} s" for one in load.phases)
    name = f"{load.model_version} on {load.replica_id}"
    if load.phase:
        return f"{name}: {load.phase}" + (f" (after {ended})" if ended else "")
    return f"{name}: {load.state}" + (f" ({ended})" if ended else "")


def _key(load: Load) -> tuple[str, str]:
    return load.replica_id, load.model_version
