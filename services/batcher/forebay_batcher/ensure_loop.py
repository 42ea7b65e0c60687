"""Makes a model version take requests on this replica: finds it there, wakes it, or has it loaded.

However many ask for it, its host is told once; who stops asking stops nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from forebay.engine.v1 import engine_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason

from forebay_batcher.core.models import Model, ModelState
from forebay_batcher.replica import Replica, Watch

_TOLD_EVERY_S = 0.1
# A host that was told to load says so in its next report; until then it has nothing to say.
_UNTOLD = (ModelState.UNKNOWN, ModelState.COLD, ModelState.FAILED)

Order = Callable[[pb.ModelSpec], Awaitable[None]]


class EnsureLoop:
    """Orders loads and wake-ups, and follows them."""

    def __init__(self, replica: Replica, *, load: Order, wake: Order) -> None:
        """`load` and `wake` tell the host and return, or raise, when it is done."""
        self._replica = replica
        self._load = load
        self._wake = wake
        self._orders: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: pb.ModelSpec) -> AsyncGenerator[Model, None]:
        """Follow the model until it takes requests or has failed; it changes from part to part.

        Raises:
            ForebayError: DRAINING, NO_REPLICA (the host is not there), or what the host refuses or
                fails with.
        """
        name = spec.model_version
        watch = Watch(self._replica, interval_s=_TOLD_EVERY_S)
        told: Model | None = None
        order: asyncio.Task[None] | None = None
        while True:
            await watch.next()
            self._check()
            model = self._replica.engine.models.get(name)
            if model is not None and model.is_active:
                yield model
                return
            if order is None:
                order = self._order(spec, model)
            elif order.done():
                order.result()
                # Done, and its report is still on its way.
                order = None if self._is_gone(model) else order
            if model is not None and (told is None or _shown(model) != _shown(told)):
                told = model
                yield model

    async def close(self) -> None:
        """Stop following; what hosts were told goes on."""
        for order in self._orders.values():
            order.cancel()
        await asyncio.gather(*self._orders.values(), return_exceptions=True)

    def _check(self) -> None:
        if self._replica.standing.draining:
            raise ForebayError(Reason.DRAINING, "The replica takes no new work.", retry_after_s=1)
        if not self._replica.engine.heard:
            raise ForebayError(
                Reason.NO_REPLICA, "The replica's engine host is not there.", retry_after_s=1
            )

    def _is_gone(self, model: Model | None) -> bool:
        return model is None or model.state in _UNTOLD

    def _order(self, spec: pb.ModelSpec, model: Model | None) -> asyncio.Task[None]:
        name = spec.model_version
        order = self._orders.get(name)
        if order is not None and not order.done():
            return order
        sleeps = model is not None and model.state is ModelState.SLEEPING
        task = asyncio.get_running_loop().create_task(
            _run(self._wake if sleeps else self._load, spec), name=f"ensure {name}"
        )
        self._orders[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))
        return task

    def _ended(self, name: str, order: asyncio.Task[None]) -> None:
        if self._orders.get(name) is order:
            del self._orders[name]
        if not order.cancelled():
            order.exception()
        # Whoever follows looks again, also when the replica itself has nothing new.
        self._replica.nudge()


async def _run(order: Order, spec: pb.ModelSpec) -> None:
    await order(spec)


def _shown(model: Model) -> tuple[ModelState, int]:
    return model.state, model.phase
