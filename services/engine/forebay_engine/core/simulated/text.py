"""From token bytes to text deltas: whole characters only, and never a part of a stop text."""

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one answer as it grows.

    Text that could be the beginning of a stop text is held back until it is certain.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._incomplete = b""
        self._held = ""

    def push(self, data: bytes, *, honour: bool = True) -> tuple[str, str | None]:
        """Add bytes. Returns the text that is certain, and the stop text once one is complete.

        With `honour` false the bytes end nothing, as before `min_tokens`.
        """
        data = self._incomplete + data
        text, decoded = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[decoded:]
        if not self._stops:
            return text, None
        self._held += text
        if not honour:
            delta, self._held = self._held, ""
            return delta, None
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            position, stop = min(found)
            delta, self._held = self._held[:position], ""
            return delta, stop
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        delta, self._held = self._held[:cut], self._held[cut:]
        return delta, None

    def finish(self) -> str:
        """Return what was held back."""
        rest = self._held + self._incomplete.decode("utf-8", "replace")
        self._held, self._incomplete = "", b""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
