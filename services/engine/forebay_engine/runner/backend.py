"""The port that every back end of a runner implements."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.metadata import Usage

from forebay_engine.core import link


class Phase(Enum):
    """The phases of a load that a runner reports, with the numbers of `engine.v1.LoadPhase`."""

    IMPORT = 2
    ENGINE_INIT = 3
    WEIGHTS = 4
    WARM_UP = 5
    CANARY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a back end is once it is loaded."""

    max_sequences: int
    kv_cache_tokens: int
    context_tokens: int
    system_fingerprint: str
    can_sleep: bool


@dataclass(slots=True)
class Call:
    """One call, and what happens to it: its back end fills in times and counts as they are known.

    Times are `time.time_ns()`; 0 is not yet.
    """

    request_id: str
    started_ns: int
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)

    def usage(self) -> Usage:
        """Return the tokens counted so far."""
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability and its best rivals: (token id, text, log-probability)."""

    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a generated answer grew by. `finish` is None until its last delta."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[Logprob]
    finish: str | None


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes of an OpenAI answer, and the tokens whose text they hold, by choice."""

    body: bytes
    tokens: Sequence[tuple[int, Sequence[int]]]
    content_type: str
    last: bool


SendFrame = Callable[[Frame], Awaitable[None]]


class Backend(Protocol):
    """An engine inside a runner.

    A request that is refused or fails raises ForebayError. Cancelling a call frees what it holds in
    the engine at once.
    """

    async def load(self, report: Callable[[Phase], None]) -> Loaded:
        """Load the model; report each phase as it begins."""
        ...

    def generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[Delta, None]:
        """Answer a prompt."""
        ...

    async def embed(self, request: pb.EmbedRequest, call: Call) -> list[Sequence[float]]:
        """Return one vector per input."""
        ...

    async def call_openai(self, path: str, body: bytes, call: Call, send: SendFrame) -> None:
        """Answer a request of the OpenAI protocol through `send`."""
        ...

    def load_now(self) -> link.Load:
        """Return the engine's load and totals."""
        ...

    async def sleep(self) -> None:
        """Move the weights out of device memory. Raises ForebayError UNSUPPORTED."""
        ...

    async def wake(self) -> None:
        """Bring the weights back. Raises ForebayError UNSUPPORTED."""
        ...

    async def failed(self) -> str:
        """Wait until the engine cannot go on, and say why."""
        ...

    async def close(self) -> None:
        """End what must end in order; this process ends right after."""
        ...
