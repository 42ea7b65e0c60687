"""Takes up a call that goes on with an answer: what of it the back end tells again is cut off."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason

from forebay_engine.core.seam import Differs, EventSeam, TextSeam, TokenSeam
from forebay_engine.runner.backend import Call, Delta, Frame, Mode, Resumption, SendFrame

# Other paths that stream have events of other kinds, which are not cut here.
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
# With these, the text is more than what the tokens say, or comes of them in another way.
_NOT_PLAIN = ("tools", "functions", "echo", "logprobs", "use_beam_search")
_PLAIN_FIELDS = frozenset({"role", "content"})
_MODES = {pb.RESUME_MODE_PREFILL: Mode.PREFILL, pb.RESUME_MODE_REPLAY: Mode.REPLAY}
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class TextResumed:
    """The seam of a call of Generate."""

    def __init__(self, point: pb.ResumePoint, tokens: Sequence[int]) -> None:
        self._seam = TextSeam(point.text, len(tokens))

    async def rest_of(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield what was not delivered."""
        seam = self._seam
        async with contextlib.aclosing(deltas):
            async for text, tokens, logprobs, finish in deltas:
                with _refused():
                    rest, grown = seam.cut_text(text), seam.cut_tokens(tokens)
                    if finish is not None:
                        seam.check_end()
                if rest or grown or finish is not None:
                    kept = logprobs[len(tokens) - len(grown) :] if logprobs else ()
                    yield Delta(rest, grown, kept, finish)


class EventsResumed:
    """The seam of a call of CallOpenAI."""

    def __init__(self, events: EventSeam, tokens: TokenSeam) -> None:
        self._events = events
        self._tokens = tokens
        self._grown: list[tuple[int, Sequence[int]]] = []

    def rest_to(self, send: SendFrame) -> SendFrame:
        """Return what sends on only what was not delivered."""

        async def send_rest(frame: Frame) -> None:
            with _refused():
                body = self._events.cut(frame.body)
            self._grown += self._tokens.cut(frame.tokens)
            # Tokens without text leave with what completes it.
            if body or frame.last:
                grown, self._grown = self._grown, []
                await send(frame._replace(body=body, tokens=grown))

        return send_rest


def take_up_text(request: pb.GenerateRequest, call: Call) -> TextResumed | None:
    """Return the seam of a call that has a resume point, which the call then knows of.

    Raises ForebayError: UNSUPPORTED.
    """
    if not request.HasField("resume"):
        return None
    point = request.resume
    tokens = _tokens_of(point)
    if tokens.keys() - {0}:
        raise _unsupported("'resume' has tokens of more than one answer.")
    call.resumption = Resumption(tokens, {0: point.text}, _MODES.get(point.mode))
    return TextResumed(point, tokens.get(0, ()))


def take_up_events(request: pb.CallOpenAIRequest, call: Call) -> EventsResumed | None:
    """As `take_up_text`, of a streamed chat or completion."""
    if not request.HasField("resume"):
        return None
    try:
        body = _decode(request.body)
    except msgspec.DecodeError:
        body = {}
    if request.path not in _PATHS or body.get("stream") is not True:
        raise _unsupported("Only streamed chats and completions can be resumed.")
    point = request.resume
    with _refused():
        seam = EventSeam(point.events)
    tokens = _tokens_of(point)
    call.resumption = Resumption(
        tokens,
        seam.texts,
        _MODES.get(point.mode),
        is_plain=seam.fields <= _PLAIN_FIELDS and not any(map(body.get, _NOT_PLAIN)),
    )
    return EventsResumed(seam, TokenSeam({index: len(ids) for index, ids in tokens.items()}))


def _tokens_of(point: pb.ResumePoint) -> dict[int, Sequence[int]]:
    return {choice.index: tuple(choice.token_ids) for choice in point.tokens}


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except Differs:
        raise _unsupported("The answer that was delivered cannot be given again.") from None


def _unsupported(message: str) -> ForebayError:
    return ForebayError(Reason.UNSUPPORTED, message, param="resume")
