"""Which web pages may call an HTTP server from a browser, by the Fetch standard's CORS protocol.

Callers show their keys in a header that pages set themselves, so no answer ever allows credentials,
and a page that has no key gets no further than any other caller without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forebay_common.metadata import Metadata

from forebay_wire.core.http1 import RequestHead

_ANY = "*"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]{1,253}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \-]{1,2000}")
_VARY = ("Vary", "Origin")


class Cors:
    """Says what headers let a browser pass an answer on to its page."""

    def __init__(
        self, origins: Iterable[str], *, exposed: Iterable[str] = (), max_age_s: int = 600
    ) -> None:
        """
        Args:
            origins: such as `https://chat.example.com`, without a path; or `*` for all.
            exposed: headers of answers that pages may read.
            max_age_s: how long a browser keeps what it was told.

        Raises:
            ValueError: an origin is none, in words for whoever configured it.
        """
        self._origins = frozenset(origins)
        for origin in self._origins:
            if origin != _ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"'{origin}' is no origin: it must be *, or as https://chat.example.com"
                )
        self._exposed = ("Access-Control-Expose-Headers", ", ".join(exposed))
        self._max_age = ("Access-Control-Max-Age", str(max_age_s))

    def answer(self, head: RequestHead) -> Metadata:
        """Headers for the answer to any request."""
        if _ANY in self._origins:
            return (("Access-Control-Allow-Origin", _ANY), self._exposed)
        origin = head.text(b"origin")
        # Caches must not give one page what was meant for another.
        if origin is None or origin not in self._origins:
            return (_VARY,)
        return (("Access-Control-Allow-Origin", origin), self._exposed, _VARY)

    def asked(self, head: RequestHead) -> str | None:
        """The method that a preflight asks for; None of any other request."""
        if head.method != "OPTIONS" or head.text(b"origin") is None:
            return None
        return head.text(b"access-control-request-method")

    def preflight(self, head: RequestHead) -> Metadata:
        """Headers of the answer to a preflight whose method is served, beside those of `answer`."""
        told: Metadata = (
            ("Access-Control-Allow-Methods", self.asked(head) or ""),
            self._max_age,
        )
        names = head.text(b"access-control-request-headers")
        if names is not None and _HEADER_NAMES.fullmatch(names):
            told = (*told, ("Access-Control-Allow-Headers", names))
        return told
