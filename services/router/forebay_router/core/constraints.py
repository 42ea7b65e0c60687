"""Bounds what an answer is held to: JSON schemas, regular expressions, grammars and choices.

An engine compiles these before the first token, in time that a small body can make long: nesting
costs its square, the optional properties of an object likewise, and quantifiers multiply where they
nest. A reference that leads back to itself without a value in between matches nothing and has no
end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from forebay_common.prompts import is_given

from forebay_router.core.bodies import StructuredOutputs
from forebay_router.core.bounds import Bounds
from forebay_router.core.refusal import RefusedError

_decode = msgspec.json.Decoder().decode
# What has none of these, spelled plainly or escaped, and few brackets and commas, needs no walk.
_TELLING = re.compile(rb'"(?:\$ref|pattern|patternProperties|(?:min|max)[A-Z]\w*)"|\\u')
_COUNTED = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords under which a schema stands for the same value as the one that holds it.
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_VALUE = ("not", "if", "then", "else")
_QUANTIFIER = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_UNBOUNDED = 2
"""What `*`, `+` and `{3,}` count as: engines make loops of them, which multiply by nesting, too."""


def check_structured_outputs(given: StructuredOutputs, field: str, bounds: Bounds) -> None:
    """Check `structured_outputs`.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field and the limit.
    """
    if is_given(given.json):
        check_schema(given.json, f"{field}.json", bounds)
    if given.regex is not None:
        check_pattern(given.regex, f"{field}.regex", bounds)
    if given.whitespace_pattern is not None:
        check_pattern(given.whitespace_pattern, f"{field}.whitespace_pattern", bounds)
    if given.choice is not None:
        _check_choice(given.choice, f"{field}.choice", bounds)
    if given.grammar is not None:
        _check_grammar(given.grammar, f"{field}.grammar", bounds)
    if given.structural_tag is not None:
        written = given.structural_tag.encode("utf-8", "surrogatepass")
        check_schema(written, f"{field}.structural_tag", bounds, within=True)


def check_schema(
    raw: bytes | msgspec.Raw, field: str, bounds: Bounds, *, within: bool = False
) -> None:
    """Check a JSON schema.

    Args:
        raw: the schema as the caller wrote it; where it is a JSON text, that text is the schema.
        field: its name in the body.
        bounds: how large it may be.
        within: it is no schema itself, but holds some under `schema` and `json_schema`.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field and the limit.
    """
    written = bytes(raw)
    if len(written) > bounds.schema_bytes:
        raise _over(field, f"has more than {bounds.schema_bytes} bytes")
    try:
        if written[:1] == b'"':
            written = str(_decode(written)).encode("utf-8", "surrogatepass")
        brackets = written.count(b"{") + written.count(b"[")
        commas = written.count(b",")
        if (
            brackets <= bounds.schema_depth
            and commas < min(bounds.choice_entries, bounds.schema_properties)
            and not _TELLING.search(written)
        ):
            return
        document = _decode(written)
    except RecursionError:
        raise _too_deep(field, bounds) from None
    except msgspec.DecodeError:
        # Whatever this is, it is no schema that could be large; the engine says so.
        return
    _Walk(field, bounds, within=within).check(document)


class _Walk:
    """One look through everything a document holds."""

    def __init__(self, field: str, bounds: Bounds, *, within: bool) -> None:
        self._field = field
        self._bounds = bounds
        self._within = within
        self._properties = 0
        self._choices = 0
        self._ended: set[int] = set()
        """Objects from which no reference leads back to itself."""

    def check(self, document: Any) -> None:
        for schema, root in self._nodes(document):
            self._check_node(schema)
            if "$ref" in schema:
                self._check_reference(schema, root)

    def _nodes(self, document: Any) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """Every object, with the schema in which its references are looked up."""
        waiting: list[tuple[Any, Any, int]] = [(document, document, 1)]
        while waiting:
            node, root, depth = waiting.pop()
            if depth > self._bounds.schema_depth:
                raise _too_deep(self._field, self._bounds)
            if isinstance(node, dict):
                yield node, root
                for key, inner in node.items():
                    if isinstance(inner, dict | list):
                        begins = self._within and key in ("schema", "json_schema")
                        waiting.append((inner, inner if begins else root, depth + 1))
            elif isinstance(node, list):
                waiting += [
                    (inner, root, depth + 1) for inner in node if isinstance(inner, dict | list)
                ]

    def _check_node(self, schema: Mapping[str, Any]) -> None:
        bounds = self._bounds
        properties = schema.get("properties")
        if isinstance(properties, dict):
            self._properties += len(properties)
            if self._properties > bounds.schema_properties:
                raise _over(self._field, f"has more than {bounds.schema_properties} properties")
        choices = schema.get("enum")
        if isinstance(choices, list):
            self._choices += len(choices)
            if self._choices > bounds.choice_entries:
                raise _over(self._field, f"has more than {bounds.choice_entries} enum values")
        for keyword in _COUNTED:
            count = schema.get(keyword)
            if isinstance(count, int | float) and count > bounds.pattern_repeats:
                raise _over(self._field, f"has a '{keyword}' above {bounds.pattern_repeats}")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            check_pattern(pattern, self._field, bounds)
        by_pattern = schema.get("patternProperties")
        if isinstance(by_pattern, dict):
            for name in by_pattern:
                check_pattern(name, self._field, bounds)

    def _check_reference(self, schema: Mapping[str, Any], root: Any) -> None:
        """Follow all that describes the same value: it must end. Each object is gone through once,
        whatever leads to it."""
        if id(schema) in self._ended:
            return
        on_the_way = {id(schema)}
        path: list[tuple[Any, Iterator[Any]]] = [(schema, self._same_value(schema, root))]
        while path:
            node, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                on_the_way.discard(id(node))
                self._ended.add(id(node))
            elif id(target) in on_the_way:
                raise _over(self._field, "has a '$ref' that leads back to itself")
            elif id(target) not in self._ended:
                on_the_way.add(id(target))
                path.append((target, self._same_value(target, root)))

    def _same_value(self, schema: Mapping[str, Any], root: Any) -> Iterator[Any]:
        """The objects that a schema refers to, for the value that it describes itself."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if not reference.startswith("#"):
                raise _over(self._field, "has a '$ref' to another document")
            target = _resolve(root, reference)
            if isinstance(target, dict):
                yield target
        for keyword in _SAME_VALUE_LISTS:
            inner = schema.get(keyword)
            if isinstance(inner, list):
                yield from (entry for entry in inner if isinstance(entry, dict))
        for keyword in _SAME_VALUE:
            entry = schema.get(keyword)
            if isinstance(entry, dict):
                yield entry


def _resolve(root: Any, reference: str) -> Any:
    """What a JSON pointer leads to; None where nothing is there."""
    node = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and len(name) < 10:
            node = node[int(name)] if int(name) < len(node) else None
        else:
            return None
    return node


def check_pattern(pattern: str, field: str, bounds: Bounds) -> None:
    """Check a regular expression's length, and what its quantifiers multiply to.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the field and the limit.
    """
    if len(pattern) > bounds.pattern_chars:
        raise _over(field, f"has a pattern of more than {bounds.pattern_chars} characters")
    if repeats(pattern) > bounds.pattern_repeats:
        raise _over(field, f"has a pattern that repeats more than {bounds.pattern_repeats} times")


def repeats(pattern: str) -> int:
    """How many copies of its parts an engine may have to make of a pattern, at most: a group counts
    the sum of what it holds, times its quantifier. Alternatives, and parts one after another, add
    up. Braces that are no quantifier count as text; a class counts as one character."""
    totals = [0]
    last = 0
    position = 0
    while position < len(pattern):
        character = pattern[position]
        step = 1
        if character == "\\":
            last, step = 1, 2
            totals[-1] += 1
        elif character == "[":
            last, step = 1, _class_length(pattern, position)
            totals[-1] += 1
        elif character == "(":
            totals.append(0)
            last = 0
        elif character == ")" and len(totals) > 1:
            last = max(1, totals.pop())
            totals[-1] += last
        elif character in "*+?":
            times = 1 if character == "?" else _UNBOUNDED
            totals[-1] += last * (times - 1)
            last *= times
        elif character == "{" and (match := _QUANTIFIER.match(pattern, position)) is not None:
            step = match.end() - position
            times = _times(match)
            totals[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            totals[-1] += 1
        position += step
    return sum(totals)


def _times(quantifier: re.Match[str]) -> int:
    least, most = quantifier[1], quantifier[2]
    # Longer numbers are as good as endless, and would take time to read.
    if len(least) > 9 or (most is not None and len(most) > 9):
        return 1 << 30
    if most is None:
        return max(1, int(least))
    return max(1, int(most) if most else int(least) * _UNBOUNDED)


def _class_length(pattern: str, start: int) -> int:
    """Characters of the class that begins there; to the end where it has none."""
    position = start + 1
    if pattern[position : position + 1] == "^":
        position += 1
    # A bracket that comes first is one of the class.
    if pattern[position : position + 1] == "]":
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1 - start


def _check_choice(choice: list[str], field: str, bounds: Bounds) -> None:
    if len(choice) > bounds.choice_entries:
        raise _over(field, f"has more than {bounds.choice_entries} entries")
    if sum(map(len, choice)) > bounds.schema_bytes:
        raise _over(field, f"has more than {bounds.schema_bytes} characters")


def _check_grammar(grammar: str, field: str, bounds: Bounds) -> None:
    if len(grammar) > bounds.grammar_chars:
        raise _over(field, f"has more than {bounds.grammar_chars} characters")
    grammar = _QUOTED.sub("", grammar)
    deepest = depth = 0
    for bracket in re.findall(r"[()]", grammar):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    if deepest > bounds.schema_depth:
        raise _too_deep(field, bounds)
    if repeats(grammar) > bounds.grammar_chars + bounds.pattern_repeats:
        raise _over(field, f"repeats more than {bounds.pattern_repeats} times")


def _too_deep(field: str, bounds: Bounds) -> RefusedError:
    return _over(field, f"is nested more than {bounds.schema_depth} levels deep")


def _over(field: str, problem: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{field}' {problem}.", param=field)
