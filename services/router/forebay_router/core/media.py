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
_ENTRIES_MAX = 100_000
"""Of all parts that are looked through: media are few fields and much data."""
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


class MediaCheck:
    """Looks through the parts of one request's messages."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._left = _ENTRIES_MAX

    def contents(self, content: Any, field: str) -> None:
        """Check the parts of one message, decoded from JSON.

        Raises:
            RefusedError: INVALID_ARGUMENT naming the part.
        """
        if isinstance(content, dict):
            self._part(content, field)
        elif isinstance(content, list):
            for index, part in enumerate(content):
                if isinstance(part, dict):
                    self._part(part, f"{field}[{index}]")

    def _part(self, part: Mapping[str, Any], field: str) -> None:
        if part.get("type") in _NO_MEDIA and part.get("uuid") is None:
            return
        bounds = self._bounds
        waiting: list[Any] = [part]
        while waiting:
            node = waiting.pop()
            self._left -= len(node)
            if self._left < 0:
                raise _wrong(field, f"and what is before it hold more than {_ENTRIES_MAX} entries")
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
        raise _wrong(field, "must be a data: URL, or name a host that is listed here")


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
    return _wrong(param, f"has more than {bounds.media_bytes} characters")


def _wrong(param: str, problem: str) -> RefusedError:
    return RefusedError("INVALID_ARGUMENT", f"'{param}' {problem}.", param=param)
