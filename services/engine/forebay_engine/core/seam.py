"""Cuts what was delivered before off an answer that is given again from its beginning.

A stream that moves to another replica is generated, or told, from the start there. What its caller
has is subtracted by what it amounts to, not event by event: the same text may come in other parts.
Then the rest, after what was delivered, adds up to exactly the uninterrupted answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

_DATA = b"data: "
_DONE = b"[DONE]"
_END = b"\n\n"
# One answer has one of each; a replica of its own makes others.
_HEAD = ("id", "created", "model", "system_fingerprint")
_HEAD_KEYS = frozenset((*_HEAD, "object", "choices", "usage"))
# Texts that grow by concatenation. Any other text is said once.
_GROWING = frozenset({"content", "text", "reasoning", "reasoning_content", "refusal", "arguments"})
_NUMBERED = "tool_calls"
# What an object has even when nothing of it is left.
_EMPTY: Mapping[str, Any] = {
    "text": "",
    "logprobs": None,
    "finish_reason": None,
    "stop_reason": None,
}
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T", bound=Sequence[Any])


class Differs(Exception):  # noqa: N818
    """The answer that is given again is not the one that was delivered."""


class TextSeam:
    """The seam of an answer of plain text and tokens."""

    def __init__(self, text: str, tokens: int) -> None:
        self._text = text
        self._at = 0
        self._tokens = tokens

    def cut_text(self, text: str) -> str:
        """Return what of the next text was not delivered. Raises Differs."""
        if self._at >= len(self._text):
            return text
        rest = _beyond(self._text, self._at, text)
        self._at += len(text)
        return rest

    def cut_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return which of the next tokens were not delivered."""
        if not self._tokens:
            return tokens
        cut = min(self._tokens, len(tokens))
        self._tokens -= cut
        return tokens[cut:]

    def check_end(self) -> None:
        """Raises Differs: the answer ended before what was delivered did."""
        if self._at < len(self._text) or self._tokens:
            raise Differs


class TokenSeam:
    """The seam of the tokens of several choices."""

    def __init__(self, delivered: Mapping[int, int]) -> None:
        self._left = dict(delivered)

    def cut(self, grown: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
        """Return what of the tokens was not delivered, by choice."""
        rest: list[tuple[int, Sequence[int]]] = []
        for index, tokens in grown:
            left = self._left.get(index, 0)
            cut = min(left, len(tokens))
            if cut:
                self._left[index] = left - cut
            if len(tokens) > cut:
                rest.append((index, tokens[cut:]))
        return rest


class EventSeam:
    """The seam of a streamed answer of the OpenAI protocol: chat, or a completion.

    Events are cut, merged into what came before by their choice, and left out where nothing of them
    is new. Identifiers, the time of creation and the model's name stay those of the first events.
    """

    def __init__(self, delivered: bytes) -> None:
        """Take in the events that were delivered. Raises Differs: they cannot be read."""
        self._head: dict[str, Any] = {}
        self._said: dict[str, Any] = {}
        self._choices: dict[int, _Amount] = {}
        self._had_usage = False
        self._had_end = False
        for event in _events_of(delivered):
            if event is None:
                self._had_end = True
            else:
                self._take_in(event)
        self._passed: set[int] = set()
        self._now = {index: _Amount() for index in self._choices}

    @property
    def texts(self) -> dict[int, str]:
        """The text that was delivered, by choice."""
        return {
            index: "".join(
                [
                    *_text_of(amount.parts.get("text")),
                    *_text_of(getattr(amount.parts.get("delta"), "parts", {}).get("content")),
                ]
            )
            for index, amount in self._choices.items()
        }

    @property
    def fields(self) -> frozenset[str]:
        """What the choices' deltas have held, such as `content` or `tool_calls`."""
        names: set[str] = set()
        for amount in self._choices.values():
            names |= getattr(amount.parts.get("delta"), "parts", {}).keys()
        return frozenset(names)

    def cut(self, events: bytes) -> bytes:
        """Return what of the next events, whole ones, was not delivered. Raises Differs."""
        rest: list[bytes] = []
        for event in _events_of(events):
            if event is None:
                self.check_end()
                if not self._had_end:
                    rest += (_DATA, _DONE, _END)
            elif (left := self._cut_event(event)) is not None:
                rest += (_DATA, _encode(left), _END)
        return b"".join(rest)

    def check_end(self) -> None:
        """Raises Differs: the answer ended before what was delivered did."""
        for index, amount in self._choices.items():
            if not amount.is_covered_by(self._now[index]):
                raise Differs

    def _take_in(self, event: dict[str, Any]) -> None:
        for name in _HEAD:
            if name in event:
                self._head.setdefault(name, event[name])
        for name in event.keys() - _HEAD_KEYS:
            self._said.setdefault(name, event[name])
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise Differs
        for choice in choices:
            amount = self._choices.get(choice["index"])
            if amount is None:
                amount = self._choices[choice["index"]] = _Amount()
            amount.take_in(choice)
        if not choices and event.get("usage") is not None:
            self._had_usage = True

    def _cut_event(self, event: dict[str, Any]) -> dict[str, Any] | None:
        choices = event.get("choices")
        if not isinstance(choices, list):
            # An error that ends the answer: nothing of it was delivered.
            return event
        left = {
            name: self._head.get(name, value) if name in _HEAD else value
            for name, value in event.items()
            if name in _HEAD_KEYS or name not in self._said
        }
        if not choices:
            return None if self._had_usage else left
        rest = [cut for choice in choices if (cut := self._cut_choice(choice)) is not None]
        if not rest:
            return None
        left["choices"] = rest
        return left

    def _cut_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index = choice["index"]
        delivered = self._choices.get(index)
        if delivered is None:
            return choice
        rest, is_new = delivered.cut(choice, self._now[index])
        if is_new:
            # From here on even parts without content are passed: nobody has had them.
            self._passed.add(index)
        return rest if index in self._passed else None


class _Amount:
    """What parts of an object add up to: texts and lists grow, objects merge, the rest is said
    once."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def take_in(self, part: dict[str, Any]) -> None:
        """Add a part."""
        mine = self.parts
        for name, value in part.items():
            if name == "index" or value is None:
                continue
            if name == _NUMBERED:
                numbered = mine.setdefault(name, {})
                for item in value:
                    numbered.setdefault(item["index"], _Amount()).take_in(item)
            elif isinstance(value, dict):
                mine.setdefault(name, _Amount()).take_in(value)
            elif isinstance(value, list) or name in _GROWING:
                mine[name] = mine[name] + value if name in mine else value
            else:
                mine.setdefault(name, value)

    def cut(self, part: dict[str, Any], now: "_Amount") -> tuple[dict[str, Any], bool]:
        """Return what of a part exceeds this amount, and whether that is anything.

        Args:
            part: the next part of the answer that is given again.
            now: what came of that answer before, as lengths; the part is added to it.
        """
        rest: dict[str, Any] = {}
        is_new = False
        for name, value in part.items():
            if name == "index" or value is None:
                rest[name] = value
                continue
            cut: Any
            if name == _NUMBERED:
                cut, new = self._cut_numbered(name, value, now)
            elif isinstance(value, dict):
                cut, new = self._cut_object(name, value, now)
            elif isinstance(value, list) or name in _GROWING:
                cut, new = self._cut_growing(name, value, now)
            else:
                new = name not in self.parts
                cut = value if new else None
                new = new and name not in now.parts
                now.parts[name] = value
            if cut is not None:
                rest[name] = cut
            elif name in _EMPTY:
                rest[name] = _EMPTY[name]
            elif name == "delta":
                rest[name] = {}
            is_new = is_new or new
        return rest, is_new

    def is_covered_by(self, now: "_Amount") -> bool:
        """Say whether all of this came again."""
        for name, mine in self.parts.items():
            theirs = now.parts.get(name)
            if isinstance(mine, _Amount):
                covered = mine.is_covered_by(theirs or _Amount())
            elif isinstance(mine, dict):
                covered = all(
                    item.is_covered_by((theirs or {}).get(number) or _Amount())
                    for number, item in mine.items()
                )
            elif isinstance(mine, list) or name in _GROWING:
                covered = (theirs or 0) >= len(mine)
            else:
                covered = theirs is not None
            if not covered:
                return False
        return True

    def _cut_numbered(
        self, name: str, items: list[dict[str, Any]], now: "_Amount"
    ) -> tuple[list[dict[str, Any]] | None, bool]:
        delivered = self.parts.get(name, {})
        seen = now.parts.setdefault(name, {})
        rest: list[dict[str, Any]] = []
        for item in items:
            number = item["index"]
            amount = delivered.get(number) or _Amount()
            cut, new = amount.cut(item, seen.setdefault(number, _Amount()))
            if new:
                rest.append(cut)
        return rest or None, bool(rest)

    def _cut_object(
        self, name: str, value: dict[str, Any], now: "_Amount"
    ) -> tuple[dict[str, Any] | None, bool]:
        delivered = self.parts.get(name) or _Amount()
        rest, new = delivered.cut(value, now.parts.setdefault(name, _Amount()))
        # An object that was empty from the start is what it was.
        return rest if new or not value else None, new

    def _cut_growing(self, name: str, value: _T, now: "_Amount") -> tuple[_T | None, bool]:
        at = now.parts.get(name, 0)
        now.parts[name] = at + len(value)
        delivered = self.parts.get(name)
        if delivered is None or at >= len(delivered):
            # Empty texts are passed, but are no reason to pass anything.
            return value, bool(value)
        rest = _beyond(delivered, at, value)
        return rest if len(rest) else None, bool(rest)


def _beyond(delivered: _T, at: int, value: _T) -> _T:
    """Return what of a value that begins at a place lies beyond what was delivered.

    Texts must agree. Entries of lists need not: a log-probability is not the same to the last bit
    on another replica.
    """
    reached = len(delivered) - at
    if isinstance(value, str) and delivered[at : at + len(value)] != value[:reached]:
        raise Differs
    rest: _T = value[reached:]  # type: ignore[assignment]
    return rest


def _text_of(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else ()


def _events_of(data: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of whole events; None is the end of the answer. Raises Differs."""
    for event in data.split(_END):
        if not event:
            continue
        if not event.startswith(_DATA):
            raise Differs
        document = event[len(_DATA) :]
        if document == _DONE:
            yield None
            continue
        try:
            yield _decode(document)
        except msgspec.DecodeError:
            raise Differs from None
