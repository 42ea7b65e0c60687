"""From records and launched processes to the replicas that a tick looks at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine

from forebay_autoscaler.core.model import Phase, ReplicaSeen


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A replica that the launcher runs."""

    replica_id: str
    pool: str
    age_s: float
    is_stopping: bool
    was_active: bool = False
    """It was seen active, by this leader or an earlier one."""


def see_replicas(
    pool: str,
    records: Iterable[batcher.Replica],
    launched: Iterable[Launched],
    gone: Set[str],
) -> tuple[ReplicaSeen, ...]:
    """Every replica of a pool, by id.

    Args:
        pool: the pool's name.
        records: what discovery holds, of any pool.
        launched: what the launcher runs, of any pool.
        gone: replicas whose processes have ended; their records outlive them by a lease.
    """
    processes = {each.replica_id: each for each in launched if each.pool == pool}
    seen: dict[str, ReplicaSeen] = {}
    for record in records:
        if record.pool != pool or record.replica_id in gone:
            continue
        process = processes.pop(record.replica_id, None)
        is_stopping = process is not None and process.is_stopping
        seen[record.replica_id] = ReplicaSeen(
            replica_id=record.replica_id,
            phase=Phase.DRAINING if is_stopping else phase_of(record),
            requests=sum(model.queued + model.in_flight for model in record.models),
            age_s=0.0 if process is None else process.age_s,
            is_owned=process is not None,
            is_announced=True,
            was_active=process is not None and process.was_active,
        )
    for process in processes.values():
        seen[process.replica_id] = ReplicaSeen(
            replica_id=process.replica_id,
            phase=Phase.DRAINING if process.is_stopping else Phase.STARTING,
            requests=None,
            age_s=process.age_s,
            is_owned=True,
            is_announced=False,
            was_active=process.was_active,
        )
    return tuple(seen[replica_id] for replica_id in sorted(seen))


def phase_of(record: batcher.Replica) -> Phase:
    """What an announced replica does: it is ready only with every one of its models."""
    if record.draining:
        return Phase.DRAINING
    is_loaded = bool(record.models) and all(
        model.state == engine.MODEL_STATE_ACTIVE for model in record.models
    )
    if not is_loaded:
        return Phase.STARTING
    return Phase.STANDBY if record.role == batcher.ROLE_STANDBY else Phase.ACTIVE
