"""vLLM's refusals as ours: a reason of the table, and never the caller's own words.

vLLM repeats parts of the input in some messages. Such a message is replaced, not trimmed.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from forebay_common.errors import ForebayError, Reason

_CONTEXT = re.compile(
    r"maximum (?:context|model) length|max_model_len|longer than the maximum", re.I
)
_FIGURES = re.compile(r"\d+")
_PYDANTIC = re.compile(
    r"'loc': '(?P<loc>[^']*)', 'msg': (?P<quote>['\"])(?P<msg>.*?)(?P=quote)[,}]"
)
# vLLM's own notes: parameter and value, hints at its configuration, dumps of its objects.
_NOTES = re.compile(r"\s*(?:\(parameter=.*\)|To increase this limit.*|:? \{.*\}?.*)$", re.S)
_NAMED = re.compile(r"(\w+) must be ")
_MALFORMED = "The request was refused as malformed."
# Shorter texts of a caller's are words that a message may well use by itself.
_OWN_WORDS_MIN = 12
_MESSAGE_CHARACTERS_MAX = 300

_BY_STATUS = {
    405: Reason.METHOD_NOT_ALLOWED,
    413: Reason.BODY_TOO_LARGE,
    429: Reason.QUEUE_FULL,
    501: Reason.UNSUPPORTED,
    503: Reason.QUEUE_FULL,
}


def from_answer(status: int, answer: bytes, request: bytes) -> ForebayError:
    """Return the error of an HTTP answer that is none of 2xx."""
    message, param = _read(answer)
    if status in (400, 422):
        return refuse(message, param=param, request=request)
    if status == 404:
        return ForebayError(Reason.UNSUPPORTED, "This model does not offer that path.")
    reason = _BY_STATUS.get(status, Reason.INTERNAL)
    if reason is Reason.INTERNAL:
        return ForebayError(reason, "The engine failed on this request.")
    return ForebayError(reason, _harmless(message, request), param=param)


def refuse(message: str, *, param: str | None, request: bytes = b"") -> ForebayError:
    """Return the error for a request that vLLM found wrong."""
    if "ValidatorIterator" in message:
        # The parts of a message's content are only looked at when the prompt is rendered.
        return ForebayError(
            Reason.INVALID_ARGUMENT, "'messages' has a malformed content.", param="messages"
        )
    message = _for_callers(message)
    if param is None and (named := _NAMED.match(message)) is not None:
        param = named[1] if f'"{named[1]}"'.encode() in request else None
    if _CONTEXT.search(message):
        return ForebayError(
            Reason.CONTEXT_LENGTH_EXCEEDED, _harmless(message, request), param=_field(param)
        )
    found = _PYDANTIC.search(message)
    if found is not None:
        field = _field(param or found["loc"])
        text = found["msg"].removeprefix("Value error, ")
        problem = f"'{field}': {text}." if field else f"{text}."
        return ForebayError(
            Reason.INVALID_ARGUMENT, _harmless(problem.replace("..", "."), request), param=field
        )
    return ForebayError(Reason.INVALID_ARGUMENT, _harmless(message, request), param=_field(param))


def _read(answer: bytes) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["message"]), error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return _MALFORMED, None


def _for_callers(message: str) -> str:
    """Return a message without what only means something to vLLM's operators."""
    if _PYDANTIC.search(message):
        return message
    return _NOTES.sub("", message).rstrip(" :") or _MALFORMED


def _field(param: str | None) -> str | None:
    if param is None:
        return None
    return param.removeprefix("body.").removeprefix("body") or None


def _harmless(message: str, request: bytes) -> str:
    """Return the message, or a plain one when it repeats a text of the request."""
    line = " ".join(message.split())[:_MESSAGE_CHARACTERS_MAX]
    try:
        fields = msgspec.json.decode(request) if request else None
    except msgspec.DecodeError:
        fields = None
    for text in _texts(fields):
        start = " ".join(text.split())[:_OWN_WORDS_MIN]
        if len(start) >= _OWN_WORDS_MIN and start in line:
            return _MALFORMED
    return line


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
