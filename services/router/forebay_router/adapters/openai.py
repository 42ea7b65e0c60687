"""The OpenAI protocol over HTTP. Bodies and answers pass as bytes; neither is decoded here.

A request's answer begins with the status its first message implies: nothing is sent before that
message is there. After it, a failure is one last event of the stream.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.inference.v1 import inference_service_pb2 as inference
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common import metadata as md
from forebay_common.errors import ForebayError, Reason
from forebay_wire.core.cors import Cors
from forebay_wire.core.http1 import HttpLimits, RequestHead
from forebay_wire.exchange import (
    OPENAI_ERRORS,
    Endpoint,
    ErrorShape,
    Exchange,
    NotAllowedError,
    answer_json,
)
from forebay_wire.http import HttpServer
from forebay_wire.policy import Head, Method
from forebay_wire.sse import Relays, relay_openai
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from forebay_router.adapters.catalogue import CatalogueView
from forebay_router.adapters.error_shapes import ANTHROPIC_ERRORS, RESPONSES_ERRORS
from forebay_router.core.access import Identity, scope_of_route
from forebay_router.core.openai import PATHS
from forebay_router.gate import Gate, require

TIMEOUT = "x-request-timeout-s"
# What is passed on, by the header it comes in; of two that mean the same, the last counts.
_PASSED_ON = tuple(
    (header.encode(), key)
    for header, key in (
        (md.CLASS, md.CLASS),
        (md.TENANT, md.TENANT),
        ("x-session-id", md.SESSION),
        (md.SESSION, md.SESSION),
    )
)
# Where Anthropic's clients put what others send as a bearer token.
_API_KEY = b"x-api-key"
_AUTHORIZATION = md.AUTHORIZATION.encode()
_TRACE = tuple((key.encode(), key) for key in (md.TRACEPARENT, md.TRACESTATE))
_MODELS = "/v1/models"
EXPOSED = (
    "X-Request-Id",
    "Retry-After",
    "retry-after-ms",
    *(
        f"x-ratelimit-{what}-{kind}"
        for kind in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
"""Headers of answers that web pages may read."""
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")

NotReady = Callable[[], Sequence[str]]


class OpenAIFront:
    """The router's HTTP side."""

    def __init__(
        self,
        relay: Relays,
        catalogue: CatalogueView,
        registry_: CollectorRegistry,
        limits: HttpLimits,
        *,
        not_ready: NotReady,
        gate: Gate,
        cors: Cors | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`not_ready` gives the reasons why requests cannot be answered now; none when they can."""
        self._relay = relay
        self._catalogue = catalogue
        self._registry = registry_
        self._limits = limits
        self._not_ready = not_ready
        self._gate = gate
        self._clock = clock
        self._routes: Mapping[str, Mapping[str, Endpoint]] = {
            **{
                path: {"POST": Endpoint(self._infer, is_work=True, errors=_errors_of(path))}
                for path in PATHS
            },
            **{
                path: _readable(answer)
                for path, answer in (
                    (_MODELS, self._list_models),
                    ("/health/live", self._live),
                    ("/health/ready", self._ready),
                    ("/metrics", self._metrics),
                )
            },
        }
        self._one_model = _readable(self._get_model)
        self.server = HttpServer(self._find, limits, cors=cors)

    def _find(self, method: str, path: str) -> Endpoint:
        offered = self._routes.get(path)
        if offered is None and path.startswith(f"{_MODELS}/") and len(path) > len(_MODELS) + 1:
            offered = self._one_model
        if offered is None:
            raise ForebayError(Reason.ROUTE_NOT_FOUND, "There is no such path here.")
        if method not in offered:
            raise NotAllowedError(", ".join(offered))
        return offered[method]

    def _infer(self, exchange: Exchange) -> None:
        head = self._head_of(exchange)
        request = inference.CallOpenAIRequest(path=exchange.head.path, body=exchange.body)
        relay_openai(
            self._relay,
            exchange,
            head,
            request.SerializeToString(),
            answer_bytes=self._limits.answer_bytes,
        )

    def _head_of(self, exchange: Exchange) -> Head:
        http = exchange.head
        metadata: dict[str, str] = {}
        for header, key in _PASSED_ON:
            value = http.text(header)
            if value is not None:
                metadata[key] = value
        metadata.update(_key_of(http))
        for header, key in _TRACE:
            # What is no text of gRPC's would fail the request; a trace is not worth that.
            value = http.text(header)
            if value is not None and value.isascii() and value.isprintable():
                metadata[key] = value
        return Head(
            method=Method.CALL_OPENAI,
            metadata=metadata,
            deadline=self._deadline_of(http),
            request_id=exchange.request_id,
        )

    def _deadline_of(self, http: RequestHead) -> float | None:
        timeout = http.text(TIMEOUT.encode())
        if timeout is None:
            return None
        if not _SECONDS.fullmatch(timeout) or float(timeout) <= 0:
            message = f"'{TIMEOUT}' must be a number of seconds above 0, such as 30 or 2.5."
            raise ForebayError(Reason.INVALID_ARGUMENT, message, param=TIMEOUT)
        return self._clock() + float(timeout)

    def _list_models(self, exchange: Exchange) -> None:
        answer_json(exchange, {"object": "list", "data": list(self._models(exchange).values())})

    def _get_model(self, exchange: Exchange) -> None:
        model = self._models(exchange).get(exchange.head.path.removeprefix(f"{_MODELS}/"))
        if model is None:
            raise ForebayError(Reason.MODEL_NOT_FOUND, "The model does not exist.", param="model")
        answer_json(exchange, model)

    def _models(self, exchange: Exchange) -> dict[str, dict[str, Any]]:
        tenant = self._let_in(exchange).tenant
        if not self._catalogue.is_listed:
            raise ForebayError(Reason.STORE_UNAVAILABLE, "The models are not known yet.")
        listed = list_models(self._catalogue.contract())
        return {name: model for name, model in listed.items() if tenant.allows_model(name)}

    def _live(self, exchange: Exchange) -> None:
        answer_json(exchange, {"status": "ok"})

    def _ready(self, exchange: Exchange) -> None:
        reasons = [*self._not_ready(), *(["draining"] if self.server.draining else [])]
        if reasons:
            answer_json(exchange, {"status": "unavailable", "reasons": reasons}, status=503)
        else:
            answer_json(exchange, {"status": "ok"})

    def _let_in(self, exchange: Exchange) -> Identity:
        """Who asks; what asks models is checked by the relay's policy instead."""
        identity = self._gate.identify(_key_of(exchange.head))
        scope = scope_of_route(exchange.head.path)
        if scope is not None:
            require(identity, scope)
        return identity

    def _metrics(self, exchange: Exchange) -> None:
        self._let_in(exchange)
        exchange.answer(generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)


def _key_of(http: RequestHead) -> dict[str, str]:
    """The key that a client shows, as metadata."""
    bearer = http.text(_AUTHORIZATION)
    if bearer is not None:
        return {md.AUTHORIZATION: bearer}
    api_key = http.text(_API_KEY)
    return {} if api_key is None else {md.AUTHORIZATION: f"Bearer {api_key}"}


def _errors_of(path: str) -> ErrorShape:
    if path.startswith("/v1/messages"):
        return ANTHROPIC_ERRORS
    return RESPONSES_ERRORS if path == "/v1/responses" else OPENAI_ERRORS


def _readable(answer: Callable[[Exchange], None]) -> dict[str, Endpoint]:
    endpoint = Endpoint(answer)
    return {"GET": endpoint, "HEAD": endpoint}


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
