"""One request on its way through a router, and each of its attempts."""

from __future__ import annotations

import asyncio
import dataclasses

from forebay_common.errors import ForebayError
from forebay_common.metadata import Metadata
from forebay_wire.policy import Head
from opentelemetry.trace import Span

from forebay_router.adapters.quota import Hold
from forebay_router.core.access import Tenant
from forebay_router.core.explain import Attempt, Record
from forebay_router.core.place import Ask, Ticket
from forebay_router.core.wanted import Wanted


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One request. Not frozen: each makes one, and it grows as more is known."""

    head: Head
    message: bytes
    span: Span | None
    trace: Metadata
    """The trace context for the next hop."""
    record: Record
    started_s: float
    place_span: Span | None = None
    deadline: float = 0.0
    wanted: Wanted | None = None
    tenant: Tenant | None = None
    passed_on: Metadata = ()
    """What else of the caller's the next hop gets."""
    tries: list[Try] = dataclasses.field(default_factory=list)
    """Attempts that run: one, or two while it is hedged."""
    tried: tuple[str, ...] = ()
    """Replicas it was sent to."""
    attempts: int = 0
    """Those that began the answer anew."""
    resumes: int = 0
    ask: Ask | None = None
    digest: bytes | None = None
    """Its name in the quarantine, while it is a suspect."""
    gate: asyncio.Semaphore | None = None
    """Passed after it waited for a model, and opened again at its first token."""
    continuation: bytes | None = None
    """Sent in place of the message: where its answer goes on."""
    broken_by: ForebayError | None = None
    """What ended the attempt after which its answer goes on."""
    shadow: str = ""
    """The version that gets a copy of it; empty for most."""
    hold: Hold | None = None
    """What it was let in with, where its tenant is limited."""


@dataclasses.dataclass(slots=True, eq=False)
class Try:
    """One attempt: what it holds until it has ended."""

    flight: Flight
    replica_id: str
    attempt: Attempt
    ticket: Ticket
    is_probe: bool = False
    """It is to show whether its replica is well again, and has not yet."""
