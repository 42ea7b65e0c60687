"""Under load, lets a stream's tokens share messages: less work per token on the way to the caller.

vLLM itself does the sharing, by a request's `stream_interval`: its first and last results come at
once, and those between hold so many tokens. It is decided when a request begins, by how many are
under way then.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


class Merging:
    """Counts the calls under way on one engine, and shapes new ones."""

    def __init__(self, *, from_running: int, tokens: int) -> None:
        self._from_running = from_running
        self._tokens = tokens
        self._running = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call for as long as it lasts."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def shape(self, params: Any) -> None:
        """Set how many tokens the results of a request hold."""
        if self._tokens > 1 and self._running >= self._from_running:
            params.stream_interval = max(params.stream_interval or 1, self._tokens)
