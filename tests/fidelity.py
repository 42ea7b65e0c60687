"""Compares two answers to the same request of OpenAI's protocol, field by field.

Ids and times are made anew for each answer: what is compared of them is that they are there, and
which ids are the same within an answer. Tokens of a stream may share an event when they came while
it was busy: what is compared is the sequence of events, with those that only go on with a text
joined.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp

from tests.fidelity_cases import Case

_TIMES = frozenset(("created", "created_at"))
_ID = re.compile(
    r"(chatcmpl|cmpl|resp|msg|rs|fc|call|embd|score|pool|classify|rerank|chatcmpl-tool|toolu|infinity)"
    r"[-_]?[A-Za-z0-9._-]{8,}"
)
_ID_KEYS = frozenset(("id", "item_id", "call_id", "request_id", "tool_call_id", "tool_use_id"))


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    content_type: str
    body: bytes

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return self.content_type.startswith("text/event-stream")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A field that is not the same."""

    where: str
    """Such as `choices[0].message.content`; of an event, its number first."""
    bare: Any
    """What vLLM's own server says; None where the field is absent."""
    ours: Any

    def __str__(self) -> str:
        return f"{self.where}: {_short(self.bare)} != {_short(self.ours)}"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    """Send a request and read its whole answer."""
    data = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"content-type": "application/json"}
    async with session.request(case.method, url + case.path, data=data, headers=headers) as answer:
        return Answer(answer.status, answer.headers["content-type"], await answer.read())


def differences(bare: Answer, ours: Answer) -> list[Difference]:
    """All fields that two answers do not share."""
    if bare.status != ours.status:
        return [Difference("status", _told(bare), _told(ours))]
    found = []
    if bare.content_type.replace(" ", "") != ours.content_type.replace(" ", ""):
        found.append(Difference("content-type", bare.content_type, ours.content_type))
    if bare.streams and ours.streams:
        return [*found, *_compare("", _events(bare.body), _events(ours.body))]
    return [*found, *_compare("", _normal(_document(bare), {}), _normal(_document(ours), {}))]


def _told(answer: Answer) -> str:
    return f"{answer.status} {answer.body[:300].decode(errors='replace')}"


def _document(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body.decode(errors="replace")


def _normal(value: Any, ids: dict[str, str], key: str = "") -> Any:
    """The value, with what each answer makes anew replaced by what it is."""
    if isinstance(value, dict):
        return {name: _normal(inner, ids, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_normal(inner, ids, key) for inner in value]
    if key in _TIMES and isinstance(value, int):
        return "time"
    if key in _ID_KEYS and isinstance(value, str) and (match := _ID.fullmatch(value)) is not None:
        return ids.setdefault(value, f"{match[1]} {len(ids)}")
    return value


def _events(body: bytes) -> dict[str, list[Any]]:
    """The events of a stream, those of each choice by themselves."""
    ids: dict[str, str] = {}
    events: dict[str, list[Any]] = {}
    number = 0
    for block in body.decode().split("\n\n"):
        if not block.strip():
            continue
        name, data = "", block
        if block.startswith("event: "):
            name, _, data = block.removeprefix("event: ").partition("\n")
        if not data.startswith("data: "):
            events.setdefault("malformed", []).append(block)
            continue
        data = data.removeprefix("data: ")
        event = data if data == "[DONE]" else _normal(json.loads(data), ids)
        group = "events"
        if isinstance(event, dict):
            if "sequence_number" in event:
                # They count events, which may have been joined.
                if event.pop("sequence_number") != number:
                    events.setdefault("malformed", []).append("a sequence number is missing")
                number += 1
            if len(event.get("choices", ())) == 1:
                group = f"choice {event['choices'][0]['index']}"
        if name:
            event = {"event": name, "data": event}
        together = events.setdefault(group, [])
        if not together or not _join(together[-1], event):
            together.append(event)
    return events


def _join(last: Any, event: Any) -> bool:
    """Add an event to the last one where it only goes on with its text. Returns whether it did."""
    if not (isinstance(last, dict) and isinstance(event, dict)):
        return False
    if "data" in last and "data" in event:
        first, second = last["data"], event["data"]
        same = {k: v for k, v in first.items() if k != "delta"}
        if "delta" not in first or same != {k: v for k, v in second.items() if k != "delta"}:
            return False
        if isinstance(first["delta"], str):
            first["delta"] += second["delta"]
            return True
        return _join_texts(first["delta"], second["delta"])
    choices, more = last.get("choices"), event.get("choices")
    if not choices or not more or len(choices) != 1 or len(more) != 1:
        return False
    first, second = choices[0], more[0]
    if first["index"] != second["index"] or first.get("finish_reason"):
        return False
    if not _grows(last.get("usage"), event.get("usage")) or set(first) != set(second):
        return False
    if "delta" in first:
        if set(first["delta"]) != {"content"} or set(second["delta"]) != {"content"}:
            return False
        first["delta"]["content"] += second["delta"]["content"]
    elif "text" in first:
        first["text"] += second["text"]
    else:
        return False
    for key, value in second.items():
        if key in ("logprobs", "token_ids") and value is not None and first[key] is not None:
            _extend(first, key, value)
        elif key not in ("delta", "text"):
            first[key] = value
    if "usage" in event:
        last["usage"] = event["usage"]
    return True


def _grows(usage: dict[str, int] | None, later: dict[str, int] | None) -> bool:
    """Whether a count that is told with each event goes on; none may be told."""
    if usage is None or later is None:
        return usage is later
    return later["completion_tokens"] > usage["completion_tokens"]


def _join_texts(first: dict[str, Any], second: dict[str, Any]) -> bool:
    for key in ("text", "partial_json", "thinking"):
        if key in first and key in second:
            first[key] += second[key]
            return True
    return False


def _extend(first: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, list):
        first[key] = first[key] + value
        return
    for name, inner in value.items():
        if isinstance(inner, list) and isinstance(first[key].get(name), list):
            first[key][name] = first[key][name] + inner


def _compare(where: str, bare: Any, ours: Any) -> Iterator[Difference]:
    if isinstance(bare, dict) and isinstance(ours, dict):
        for key in [*bare, *(key for key in ours if key not in bare)]:
            inner = f"{where}.{key}" if where else key
            yield from _compare(inner, bare.get(key, ABSENT), ours.get(key, ABSENT))
    elif isinstance(bare, list) and isinstance(ours, list) and len(bare) == len(ours):
        for index, (left, right) in enumerate(zip(bare, ours, strict=True)):
            yield from _compare(f"{where}[{index}]", left, right)
    elif bare != ours or type(bare) is not type(ours):
        yield Difference(where, bare, ours)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 600 else f"{text[:600]}…"
