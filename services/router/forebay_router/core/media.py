"""Bounds where the media of a request may come from: from itself, or from hosts on a list.

An engine fetches whatever URL it is given, from inside the network that it runs in. So a URL is
passed on only if its host is listed and nothing in it could be read as another host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from forebay_router.core.bounds import Bounds
from forebay_router.core.refusal import RefusedError

# No user, no escapes, no backslash, no control character: what two parsers could read differently.
_URL = re.compile(
    r"(?i:https?)://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)"
    r"(?::(?P<port>[0-9]{1,5}))?(?:[/?][!$-;=?-Z_a-z~\[\]]*)?"
)
_USUAL_PORTS = {"http": "80", "https": "443"}
_URLS = ("url", "image_url", "audio_url", "video_url", "file_url")
_DATA = ("data", "file_data", "image_embeds", "audio_embeds", "video_embeds", "image_pil")
# What holds words of a caller's or a model's, among them URLs that nobody fetches.
_NO_MEDIA = frozenset(
    (
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_reference",
    )
)


def check_contents(content: Any, field: str, bounds: Bounds) -> None:
    """Check the parts of one message, decoded from JSON.

    Raises:
        RefusedError: INVALID_ARGUMENT naming the part.
    """
    if isinstance(content, dict):
        _check_part(content, field, bounds)
    elif isinstance(content, list):
        for index, part in enumerate(content):
            if isinstance(part, dict):
                _check_part(part, f"{field}[{index}]", bounds)


def _check_part(part: Mapping[str, Any], field: str, bounds: Bounds) -> None:
    if part.get("type") in _NO_MEDIA and part.get("uuid") is None:
        return
    waiting: list[Any] = [part]
    while waiting:
        node = waiting.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict):
                # A tool's result holds parts again.
                if value.get("type") not in _NO_MEDIA or value.get("uuid") is not None:
                    waiting.append(value)
            elif isinstance(value, list):
                waiting.append(value)
            elif isinstance(value, str):
                if key in _URLS:
                    _check_url(value, f"{field}.{key}", bounds)
                elif key in _DATA and len(value) > bounds.media_bytes:
                    raise _over(f"{field}.{key}", bounds)


def _check_url(url: str, field: str, bounds: Bounds) -> None:
    if url[:5].lower() == "data:":
        if len(url) > bounds.media_bytes:
            raise _over(field, bounds)
        return
    if not is_listed(url, bounds.media_hosts):
        problem = "must be a data: URL, or name a host that is listed here"
        raise RefusedError("INVALID_ARGUMENT", f"'{field}' {problem}.", param=field)


def is_listed(url: str, hosts: Set[str]) -> bool:
    """Whether a URL is plain HTTP(S) and names one of the hosts, each `name` or `name:port`."""
    match = _URL.fullmatch(url)
    if match is None:
        return False
    host, port = match["host"].lower(), match["port"]
    scheme = url[: url.index(":")].lower()
    if port is None or port == _USUAL_PORTS[scheme]:
        return host in hosts
    return f"{host}:{port}" in hosts


def _over(param: str, bounds: Bounds) -> RefusedError:
    problem = f"has more than {bounds.media_bytes} characters"
    return RefusedError("INVALID_ARGUMENT", f"'{param}' {problem}.", param=param)
