"""The replica in the contract's words."""

from __future__ import annotations

from forebay.batcher.v1 import batcher_service_pb2 as pb

from forebay_batcher.core.queue import PriorityClass, Queue, Request
from forebay_batcher.replica import Replica


def replica_message(replica: Replica, queue: Queue) -> pb.Replica:
    """The replica as discovery and watchers see it."""
    identity, standing = replica.identity, replica.standing
    return pb.Replica(
        replica_id=identity.replica_id,
        pool=identity.pool,
        address=replica.address,
        role=pb.Role.ValueType(standing.role),
        draining=standing.draining,
        models=[
            pb.ReplicaModel(
                model_version=model.model_version,
                state=model.state.value,  # type: ignore[arg-type]  # the numbers are the contract's
                phase=model.phase,  # type: ignore[arg-type]  # passed on as it came
                queued=queue.queued(model.model_version),
                in_flight=queue.in_flight(model.model_version),
                slots=model.slots,
                kv_cache_usage=model.kv_cache_usage,
                generated_tokens=model.generated_tokens,
                context_tokens=model.context_tokens,
                task=model.task,  # type: ignore[arg-type]  # passed on as it came
                waiting_prompt_tokens=queue.waiting_prompt_tokens(model.model_version),
                reason=model.reason,
            )
            for model in replica.engine.models.values()
        ],
        batcher_version=identity.version,
        fence=standing.fence,
    )


def warm_message(replica: Replica) -> pb.Replica:
    """A standby as the autoscaler finds it: who and where, nothing that changes."""
    identity = replica.identity
    return pb.Replica(replica_id=identity.replica_id, pool=identity.pool, address=replica.address)


def queued_message(request: Request, now: float) -> pb.QueuedRequest:
    """One waiting request."""
    message = pb.QueuedRequest(
        request_id=request.request_id,
        model_version=request.model_version,
        priority_class=class_message(request.priority),
        waited_ms=max(0, round((now - request.arrived) * 1000)),
    )
    if request.deadline is not None:
        message.remaining_ms = max(0, round((request.deadline - now) * 1000))
    return message


def class_message(priority: PriorityClass) -> pb.PriorityClass.ValueType:
    """A class; the numbers are the same."""
    return pb.PriorityClass.ValueType(priority)
