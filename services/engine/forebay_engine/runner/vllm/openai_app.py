"""Drives vLLM's OpenAI app as ASGI, in-process, and frames its answer along the engine's results.

What the app renders is kept until it asks the engine for the next result; then it is one frame,
whose tokens are exactly those of the results it was rendered from. An answer that is no success is
never framed: it becomes an error.
"""

import asyncio
from typing import Any

import msgspec
from forebay_common.errors import ForebayError, Reason

from forebay_engine.runner.backend import Call, Frame, SendFrame
from forebay_engine.runner.vllm import errors
from forebay_engine.runner.vllm.observed import CALL, CURRENT, Observation

# vLLM's app also has paths that control the engine; none of them is for callers.
_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/tokenize",
        "/detokenize",
    }
)
_ABORT_S = 5.0
_ENCODER = msgspec.json.Encoder()
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class OpenAIApp:
    """vLLM's app for one model version."""

    def __init__(self, app: Any, *, model: str) -> None:
        self._app = app
        self._model = _ENCODER.encode(model)

    async def call(self, path: str, body: bytes, call: Call, send: SendFrame) -> None:
        """Answer one request, or raise ForebayError. A cancelled call is aborted in the engine."""
        if path not in _PATHS:
            raise ForebayError(Reason.ROUTE_NOT_FOUND, "No such path in this runner.")
        exchange = _Exchange(self._name_model(body), call, send)
        # A task of its own carries the observation to whatever vLLM starts, and can be cut.
        token = CURRENT.set(exchange.observation)
        CALL.set(call)
        try:
            task = asyncio.create_task(
                self._app(_scope(path, call), exchange.receive, exchange.send)
            )
        finally:
            CURRENT.reset(token)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            exchange.disconnect()
            task.cancel()
            await asyncio.wait({task, *exchange.observation.cancel()}, timeout=_ABORT_S)
            raise
        except Exception as error:
            # vLLM's outermost handler answers and then raises again: the answer says it better.
            if exchange.observation.error is None and not exchange.answered:
                exchange.observation.error = error
        finally:
            await exchange.observation.close()
        await exchange.finish()

    def _name_model(self, body: bytes) -> bytes:
        """Return the body with the served name in place of whatever alias the caller used."""
        try:
            fields = _FIELDS.decode(body)
        except msgspec.ValidationError:
            raise ForebayError(Reason.INVALID_ARGUMENT, "The body must be a JSON object.") from None
        except msgspec.DecodeError:
            raise ForebayError(Reason.INVALID_ARGUMENT, "The body is not valid JSON.") from None
        if bytes(fields.get("model", b"")) == self._model:
            return body
        fields["model"] = msgspec.Raw(self._model)
        return _ENCODER.encode(fields)


class _Exchange:
    """The two ends that ASGI wants for one request."""

    def __init__(self, body: bytes, call: Call, send: SendFrame) -> None:
        self.observation = Observation(call, self.flush)
        self.answered = False
        self._body = body
        self._send = send
        self._status = 0
        self._content_type = ""
        self._rendered: list[bytes] = []
        self._taken = False
        self._disconnected = asyncio.Event()
        self._sending = False

    def disconnect(self) -> None:
        """Tell the app that the caller is gone."""
        self._disconnected.set()

    async def receive(self) -> dict[str, Any]:
        """Give the app the body, then nothing until the caller is gone."""
        if not self._taken:
            self._taken = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Take what the app answers; it leaves with the next frame."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            self._content_type = headers.get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            if body := message.get("body"):
                self._rendered.append(bytes(body))
            self.answered = not message.get("more_body", False)

    async def flush(self) -> None:
        """Send what was rendered. One frame at a time: several choices may be awaited at once."""
        while self._rendered and not self._sending and self._is_success():
            self._sending = True
            try:
                await self._send(self._frame(last=False))
            finally:
                self._sending = False

    async def finish(self) -> None:
        """Send the last frame, or raise what the answer turned out to be."""
        if self.observation.error is not None:
            raise _translate(self.observation.error, self._body)
        if not self._is_success():
            raise errors.from_answer(self._status, b"".join(self._rendered), self._body)
        await self._send(self._frame(last=True))

    def _is_success(self) -> bool:
        return 200 <= self._status < 300 and self.observation.error is None

    def _frame(self, *, last: bool) -> Frame:
        body = b"".join(self._rendered)
        tokens = list(self.observation.tokens.items())
        self._rendered = []
        self.observation.tokens = {}
        return Frame(body, tokens, self._content_type, last)


def _translate(error: BaseException, request: bytes) -> ForebayError:
    from forebay_engine.runner.vllm.engine_errors import translate

    return translate(error, request)


def _scope(path: str, call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        # From this version on, vLLM's framework does not wait for a disconnect beside a stream.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"x-request-id", call.request_id.encode("latin-1")),
        ],
        "client": ("runner", 0),
        "server": ("runner", 0),
        "state": {},
    }
