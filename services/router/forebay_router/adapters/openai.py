"""The OpenAI protocol over HTTP. Bodies and answers pass as bytes; neither is decoded here.

A request's answer begins with the status its first message implies: nothing is sent before that
message is there. After it, a failure is one last event of the stream.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import extract
from forebay_wire.policy import Head, Method
from forebay_wire.relay import Relay
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from forebay_router.adapters.catalogue import CatalogueView
from forebay_router.adapters.http import SSE, Answer, Call, HttpServer, Limits
from forebay_router.core.openai import PATHS

TIMEOUT = "x-request-timeout-s"
_SESSIONS = (md.SESSION, "x-session-id")
_MODELS = "/v1/models"
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")

NotReady = Callable[[], Sequence[str]]


class OpenAIFront:
    """The router's HTTP side."""

    def __init__(
        self,
        relay: Relay,
        catalogue: CatalogueView,
        registry_: CollectorRegistry,
        limits: Limits,
        not_ready: NotReady,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`not_ready` gives the reasons why requests cannot be answered now; none when they can."""
        self._relay = relay
        self._catalogue = catalogue
        self._registry = registry_
        self._not_ready = not_ready
        self._clock = clock
        self._routes: Mapping[str, Mapping[str, Answer]] = {
            **{path: {"POST": self._infer} for path in PATHS},
            **{
                path: {"GET": answer, "HEAD": answer}
                for path, answer in (
                    (_MODELS, self._list_models),
                    ("/health/live", self._live),
                    ("/health/ready", self._ready),
                    ("/metrics", self._metrics),
                )
            },
        }
        self._one_model: Mapping[str, Answer] = {"GET": self._get_model, "HEAD": self._get_model}
        self.server = HttpServer(self._find, limits)

    def _find(self, method: str, path: str) -> Answer:
        is_model = path.startswith(f"{_MODELS}/") and len(path) > len(_MODELS) + 1
        offered = self._one_model if is_model else self._routes.get(path)
        if offered is None:
            raise ForebayError(Reason.ROUTE_NOT_FOUND, "There is no such path here.")
        if method not in offered:
            return _answer_not_allowed(", ".join(offered))
        return offered[method]

    async def _infer(self, call: Call) -> web.StreamResponse:
        async with self.server.work():
            head = self._head_of(call)
            body = await call.read_body()
            request = inference.CallOpenAIRequest(path=call.request.path, body=body)
            answers = self._relay.stream(head, request.SerializeToString())
            async with contextlib.aclosing(answers):
                message = await anext(answers, None)
                if message is None:
                    raise ForebayError(Reason.INTERNAL, "The replica gave no answer.")
                first = inference.CallOpenAIResponse.FromString(message)
                if not first.content_type.startswith(SSE):
                    # Nothing is sent before all is there, so a late failure still has its status.
                    rest = [_body_of(message) async for message in answers]
                    content_type = first.content_type or "application/json"
                    return call.whole(b"".join((first.body, *rest)), content_type)
                await call.begin_stream(first.content_type)
                await call.write(first.body)
                async for message in answers:
                    if part := _body_of(message):
                        await call.write(part)
            return await call.end_stream()

    def _head_of(self, call: Call) -> Head:
        headers = call.request.headers
        metadata = {key: headers[key] for key in (md.CLASS, md.TENANT) if key in headers}
        session = next((headers[key] for key in _SESSIONS if key in headers), None)
        if session is not None:
            metadata[md.SESSION] = session
        return Head(
            method=Method.CALL_OPENAI,
            metadata=metadata,
            deadline=self._deadline_of(headers.get(TIMEOUT)),
            request_id=call.request_id,
            trace=extract((key.lower(), value) for key, value in headers.items()),
        )

    def _deadline_of(self, timeout: str | None) -> float | None:
        if timeout is None:
            return None
        if not _SECONDS.fullmatch(timeout) or float(timeout) <= 0:
            message = f"'{TIMEOUT}' must be a number of seconds above 0, such as 30 or 2.5."
            raise ForebayError(Reason.INVALID_ARGUMENT, message, param=TIMEOUT)
        return self._clock() + float(timeout)

    async def _list_models(self, call: Call) -> web.StreamResponse:
        return call.json({"object": "list", "data": list(self._models().values())})

    async def _get_model(self, call: Call) -> web.StreamResponse:
        model = self._models().get(call.request.path.removeprefix(f"{_MODELS}/"))
        if model is None:
            raise ForebayError(Reason.MODEL_NOT_FOUND, "The model does not exist.", param="model")
        return call.json(model)

    def _models(self) -> dict[str, dict[str, Any]]:
        if not self._catalogue.is_listed:
            raise ForebayError(Reason.STORE_UNAVAILABLE, "The models are not known yet.")
        return list_models(self._catalogue.contract())

    async def _live(self, call: Call) -> web.StreamResponse:
        return call.json({"status": "ok"})

    async def _ready(self, call: Call) -> web.StreamResponse:
        reasons = [*self._not_ready(), *(["draining"] if self.server.draining else [])]
        if not reasons:
            return call.json({"status": "ok"})
        return call.json({"status": "unavailable", "reasons": reasons}, status=503)

    async def _metrics(self, call: Call) -> web.StreamResponse:
        return call.whole(generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)


def _answer_not_allowed(allowed: str) -> Answer:
    error = ForebayError(Reason.METHOD_NOT_ALLOWED, f"This path takes {allowed} only.")

    async def answer(call: Call) -> web.StreamResponse:
        return call.refuse(error, allow=allowed)

    return answer


def _body_of(message: bytes) -> bytes:
    return inference.CallOpenAIResponse.FromString(message).body


def list_models(catalogue: registry.Catalogue) -> dict[str, dict[str, Any]]:
    """Every name a request may use, by name, as OpenAI's `model` objects.

    `root` is what an alias stands for, `parent` the model a version belongs to.
    """
    listed: dict[str, dict[str, Any]] = {}
    created: dict[str, int] = {}
    for model in catalogue.models:
        created[model.name] = model.created_unix_s
        listed[model.name] = _model(model.name, model.created_unix_s)
        for version in model.versions:
            name = f"{model.name}@{version.version}"
            created[name] = version.created_unix_s
            listed[name] = _model(name, version.created_unix_s, parent=model.name)
    for alias in catalogue.aliases:
        if alias.name not in listed:
            listed[alias.name] = _model(alias.name, created.get(alias.target, 0), root=alias.target)
    return listed


def _model(
    name: str, created: int, *, root: str | None = None, parent: str | None = None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "forebay",
        "root": root or name,
        "parent": parent,
    }
