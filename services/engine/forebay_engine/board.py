"""Wakes those who watch the host: at once when a state changes, less often when only load does."""

import asyncio
import contextlib
from collections.abc import Iterator


class Board:
    """What changed since each subscriber last looked. It holds no state itself."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator["Subscription"]:
        """Be told of changes from now on."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def state_changed(self) -> None:
        """A model's state, phase, limits or reason changed, or the host's."""
        for subscription in self._subscriptions:
            subscription.state_changed = True
            subscription.event.set()

    def load_changed(self) -> None:
        """Only figures of load changed."""
        for subscription in self._subscriptions:
            subscription.load_changed = True
            subscription.event.set()


class Subscription:
    """One subscriber's view of what it has not seen."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.state_changed = False
        self.load_changed = False

    async def wait(self, *, load_not_before: float) -> None:
        """Return when a state has changed, or load has and the loop's clock says it may be told."""
        loop = asyncio.get_running_loop()
        while not self.state_changed:
            if self.load_changed:
                left = load_not_before - loop.time()
                if left <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self.event.wait()
            else:
                await self.event.wait()
            self.event.clear()
        self.state_changed = self.load_changed = False
        self.event.clear()
