"""An answer that is given again: what was delivered is cut off, and nothing else."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from forebay_engine.core.seam import Differs, EventSeam, TextSeam, TokenSeam

DONE = b"data: [DONE]\n\n"
WORDS = ("a", "river", " flows", "é", "你好", "🌊", '"', "\\", "\n", ".", " ")


def an_event(answer: str, choices: list[dict[str, Any]], **fields: Any) -> bytes:
    """One event of an answer: each answer has an id and a time of its own."""
    event = {"id": answer, "created": hash(answer) % 1000, "model": "m@1", "choices": choices}
    return b"data: " + json.dumps({**event, **fields}).encode() + b"\n\n"


class Plan:
    """What a random answer amounts to; its parts are drawn anew each time it is told."""

    def __init__(self, rng: random.Random) -> None:
        self.chat = rng.random() < 0.7
        self.usage = rng.random() < 0.5
        self.logprobs = rng.random() < 0.4
        self.choices = [self._choice(rng) for _ in range(rng.choice((1, 1, 2, 3)))]

    def _choice(self, rng: random.Random) -> dict[str, Any]:
        tools = [
            {"name": f"tool{number}", "arguments": json.dumps({"x": rng.choice(WORDS) * 3})}
            for number in range(rng.choice((0, 0, 1, 2)) if self.chat else 0)
        ]
        return {
            "reasoning": "".join(rng.choices(WORDS, k=rng.randrange(4))) if self.chat else "",
            "text": "".join(rng.choices(WORDS, k=rng.randrange(9))),
            "tools": tools,
            "finish": rng.choice(("stop", "length")),
        }

    def tell(self, rng: random.Random, answer: str) -> list[bytes]:
        """The events of the answer, its choices mixed and its texts in parts of any size."""
        sources = [self._tell_choice(rng, number, answer) for number in range(len(self.choices))]
        events: list[bytes] = []
        fields = {"usage": None} if self.usage else {}
        while sources:
            source = rng.choice(sources)
            part = next(source, None)
            if part is None:
                sources.remove(source)
            else:
                events.append(an_event(answer, [part], **fields))
        if self.usage:
            events.append(an_event(answer, [], usage={"total_tokens": 5}))
        return [*events, DONE]

    def _tell_choice(self, rng: random.Random, index: int, answer: str) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        if not self.chat:
            for text, logprobs in self._parts(rng, choice["text"], legacy=True):
                yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
            yield {"index": index, "text": "", "finish_reason": choice["finish"]}
            return

        def part(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
            return {"index": index, "delta": delta, "finish_reason": None, **fields}

        yield part({"role": "assistant", "content": ""})
        for text, _ in self._parts(rng, choice["reasoning"]):
            yield part({"reasoning": text})
        for text, logprobs in self._parts(rng, choice["text"]):
            yield part({"content": text}, logprobs=logprobs)
        for number, tool in enumerate(choice["tools"]):
            head = {"id": f"call-{answer}-{number}", "type": "function"}
            function = {"name": tool["name"]}
            yield part({"tool_calls": [{"index": number, **head, "function": function}]})
            for text, _ in self._parts(rng, tool["arguments"]):
                yield part({"tool_calls": [{"index": number, "function": {"arguments": text}}]})
        yield part({}, finish_reason=choice["finish"])

    def _parts(
        self, rng: random.Random, text: str, *, legacy: bool = False
    ) -> Iterator[tuple[str, dict[str, Any] | None]]:
        at = 0
        while at < len(text):
            size = rng.randrange(1, 5)
            part = text[at : at + size]
            entries: list[Any] = [{"token": letter, "logprob": -1.5} for letter in part]
            offsets = list(range(at, at + len(part)))
            wanted = {"tokens": list(part), "text_offset": offsets} if legacy else {}
            yield part, (wanted or {"content": entries}) if self.logprobs else None
            at += size
        if not text and rng.random() < 0.3:
            yield "", None


def amount_of(events: bytes) -> dict[str, Any]:
    """What a client makes of a stream; whatever may come once only is checked here."""
    found: dict[str, Any] = {"heads": set(), "choices": {}, "usage": 0, "done": 0}
    for line in events.split(b"\n\n"):
        if not line:
            continue
        if line == DONE.strip():
            found["done"] += 1
            continue
        assert not found["done"]
        event = json.loads(line.removeprefix(b"data: "))
        found["heads"].add((event["id"], event["created"], event["model"]))
        if not event["choices"]:
            assert event["usage"] == {"total_tokens": 5}
            found["usage"] += 1
        for choice in event["choices"]:
            take_in(found["choices"].setdefault(choice["index"], {}), choice)
    return found


def take_in(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    for name in ("content", "reasoning"):
        whole[name] = whole.get(name, "") + (delta.get(name) or "")
    whole["text"] = whole.get("text", "") + choice.get("text", "")
    for name in ("role", "finish_reason"):
        value = delta.get(name) or choice.get(name)
        if value is not None:
            assert name not in whole, f"{name} came twice"
            whole[name] = value
    for name, entries in (choice.get("logprobs") or {}).items():
        whole[f"logprobs.{name}"] = whole.get(f"logprobs.{name}", []) + entries
    for item in delta.get("tool_calls", ()):
        tool = whole.setdefault("tools", {}).setdefault(item["index"], {})
        function = item.get("function", {})
        for name, value in (("id", item.get("id")), ("name", function.get("name"))):
            if value is not None:
                assert name not in tool, f"{name} came twice"
                tool[name] = value
        tool["arguments"] = tool.get("arguments", "") + function.get("arguments", "")


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_of_any_answer_is_completed_by_the_same_answer_told_again(seed: int) -> None:
    rng = random.Random(seed)
    plan = Plan(rng)
    first = plan.tell(rng, "first")
    whole = amount_of(b"".join(first))
    for cut in range(1, len(first) + 1):
        delivered = b"".join(first[:cut])
        seam = EventSeam(delivered)
        rest = b"".join(map(seam.cut, plan.tell(rng, "again")))
        seam.check_end()
        both = amount_of(delivered + rest)
        names = {
            (index, number): tool.pop("id")
            for index, choice in both["choices"].items()
            for number, tool in choice.get("tools", {}).items()
        }
        # The name of a call that was not delivered is the new one's; a known one stays.
        known = amount_of(delivered)["choices"]
        for (index, number), name in names.items():
            tools = known.get(index, {}).get("tools", {})
            assert name == f"call-{'first' if number in tools else 'again'}-{number}"
        assert both == without_names(whole), f"seed {seed}, cut {cut}"


def without_names(whole: dict[str, Any]) -> dict[str, Any]:
    return {
        **whole,
        "choices": {
            index: {
                **choice,
                **(
                    {
                        "tools": {
                            number: {k: v for k, v in tool.items() if k != "id"}
                            for number, tool in choice["tools"].items()
                        }
                    }
                    if "tools" in choice
                    else {}
                ),
            }
            for index, choice in whole["choices"].items()
        },
    }


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_can_be_moved_again(seed: int) -> None:
    rng = random.Random(seed)
    plan = Plan(rng)
    first = plan.tell(rng, "first")
    delivered = b"".join(first[: rng.randrange(1, len(first))])
    for _ in range(3):
        seam = EventSeam(delivered)
        again = [cut for event in plan.tell(rng, "again") if (cut := seam.cut(event))]
        delivered += b"".join(again[: len(again) // 2])
    seam = EventSeam(delivered)
    delivered += b"".join(map(seam.cut, plan.tell(rng, "again")))
    both, whole = amount_of(delivered), amount_of(b"".join(first))
    assert without_names(both) == without_names(whole)


def test_another_answer_is_found_out() -> None:
    def told(text: str) -> bytes:
        return an_event("x", [{"index": 0, "delta": {"content": text}}])

    with pytest.raises(Differs):
        EventSeam(told("The river")).cut(told("The lake"))
    short = EventSeam(told("The river"))
    assert short.cut(told("The")) == b""
    with pytest.raises(Differs):
        short.cut(DONE)


@pytest.mark.parametrize("data", [b"data: {\n\n", b"event: x\n\n", b'data: {"id":"x"}\n\n'])
def test_events_of_another_protocol_are_no_start(data: bytes) -> None:
    with pytest.raises(Differs):
        EventSeam(data)


def test_an_error_after_the_seam_is_passed() -> None:
    error = b'data: {"error":{"message":"x"}}\n\n'
    seam = EventSeam(an_event("x", [{"index": 0, "text": "a"}]))
    assert seam.cut(error) == error


def test_parts_without_content_are_passed_after_the_seam_alone() -> None:
    empty = an_event("x", [{"index": 0, "delta": {"content": ""}, "finish_reason": None}])
    said = an_event("x", [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}])
    seam = EventSeam(empty + said)
    assert seam.cut(empty + said + empty) == b""
    assert amount_of(seam.cut(said + empty))["choices"][0]["content"] == "a"
    assert seam.cut(empty)


def test_what_was_delivered_is_told_by_choice() -> None:
    seam = EventSeam(
        an_event("x", [{"index": 1, "delta": {"role": "assistant", "content": ""}}])
        + an_event("x", [{"index": 1, "delta": {"content": "He"}}])
        + an_event("x", [{"index": 1, "delta": {"content": "llo"}}])
    )
    assert seam.texts == {1: "Hello"}
    assert seam.fields == {"role", "content"}
    assert EventSeam(an_event("x", [{"index": 0, "text": "Hi"}])).texts == {0: "Hi"}


@pytest.mark.parametrize("k", range(12))
def test_text_and_tokens_are_cut_where_they_were_delivered(k: int) -> None:
    text, tokens = "The river flows.", list(range(12))
    seam = TextSeam(text[:k], k)
    parts = [text[:3], "", text[3:9], text[9:]]
    assert "".join(map(seam.cut_text, parts)) == text[k:]
    assert [*seam.cut_tokens(tokens[:5]), *seam.cut_tokens(tokens[5:])] == tokens[k:]
    seam.check_end()
    with pytest.raises(Differs):
        TextSeam("The lake", 0).cut_text("The river")
    with pytest.raises(Differs):
        TextSeam("The", 0).check_end()


def test_tokens_are_cut_by_choice() -> None:
    seam = TokenSeam({0: 3, 2: 1})
    assert seam.cut([(0, [1, 2]), (1, [7])]) == [(1, [7])]
    assert seam.cut([(0, [3, 4]), (2, [9, 8])]) == [(0, [4]), (2, [8])]
