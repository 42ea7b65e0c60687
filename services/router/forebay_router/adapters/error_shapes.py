"""How protocols other than OpenAI's older ones write their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forebay_common.errors import ForebayError
from forebay_wire.exchange import OPENAI_ERRORS, ErrorShape

_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_body(error: ForebayError) -> dict[str, Any]:
    status = error.status.http
    usual = "api_error" if status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_TYPES.get(status, usual), "message": error.message},
    }


def _anthropic_document(error: ForebayError) -> bytes:
    return json.dumps(_anthropic_body(error)).encode()


def _anthropic_event(error: ForebayError) -> bytes:
    return b"event: error\ndata: %b\n\n" % _anthropic_document(error)


def _responses_event(error: ForebayError) -> bytes:
    """Named as OpenAI names it, with the error once as the event has it and once as clients of all
    streams look for it."""
    body = error.openai_body()
    event = {
        "type": "error",
        "code": error.status.openai_code,
        "message": error.message,
        "param": error.param,
        **body,
    }
    return b"event: error\ndata: %b\n\n" % json.dumps(event).encode()


ANTHROPIC_ERRORS = ErrorShape(_anthropic_document, _anthropic_event)
RESPONSES_ERRORS = ErrorShape(OPENAI_ERRORS.document, _responses_event)
