"""The port that every back end of a runner implements.

A back end hands over what it has and asks the engine for more when that is taken: whoever takes it
late gets the same in fewer and larger parts, and nothing piles up but the answer itself.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.metadata import Usage

from forebay_engine.core import link

if TYPE_CHECKING:
    from forebay_engine.runner.cache_report import CacheReport


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


class Mode(StrEnum):
    """How an answer is taken up: see `forebay.inference.v1.ResumeMode`."""

    PREFILL = "prefill"
    REPLAY = "replay"


@dataclass(slots=True, eq=False)
class Resumption:
    """What the caller of a call has of its answer, from a runner that did not finish it.

    The back end gives the answer from its beginning, as if it had said all of it; what was
    delivered is cut off behind it. It counts each token once.
    """

    tokens: Mapping[int, Sequence[int]]
    """What was delivered, by choice."""
    texts: Mapping[int, str]
    """The text of it, by choice."""
    asked: Mode | None = None
    is_plain: bool = True
    """Nothing but sampling options and the engine's tokens make up the text."""
    mode: Mode | None = None
    """How the back end went about it. A call that had to replay anything was replayed."""


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
    generating: int = 0
    """Sequences of this call that the engine has not ended yet."""
    resumption: Resumption | None = None
    prompt: Callable[[], bytes] | None = None
    """Writes its prompt out as `forebay_common.prefixes` names it, until that was taken; None where
    it has none that engines keep."""
    on_generated: Callable[[], None] | None = None
    """Called when the last of them has ended: what is left of the answer need not wait any more."""

    def begin_sequence(self) -> None:
        """Note that the engine has one more sequence of this call."""
        self.generating += 1

    def end_sequence(self) -> None:
        """Note that the engine has ended one of them."""
        self.generating -= 1
        if self.generating == 0 and self.on_generated is not None:
            self.on_generated()

    def usage(self) -> Usage:
        """Return the tokens counted so far."""
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


class Logprob(NamedTuple):
    """A token's log-probability and its best rivals: (token id, text, log-probability)."""

    logprob: float
    top: tuple[tuple[int, str, float], ...]


class Delta(NamedTuple):
    """What a generated answer grew by. `finish` is None until its last delta.

    A named tuple, as there may be one per token: a frozen dataclass costs five times as much.
    """

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[Logprob]
    finish: str | None


class Frame(NamedTuple):
    """Bytes of an OpenAI answer, whole events of it, and the tokens they hold, by choice."""

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

    def report_cache(self, report: "CacheReport") -> None:
        """Tell of prompts that run and of what is cached, from now on; called before `load`. A back
        end that cannot tell what is cached begins no report."""
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
