"""What comes back: deltas, answers, vectors, models.

`Assembly` turns the messages of one stream into deltas and, at the end, an answer; both clients
share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import StrEnum

from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.registry.v1 import registry_service_pb2 as registry_pb
from forebay_common import metadata as md
from forebay_common.errors import Reason
from forebay_common.metadata import Usage

from forebay_client.errors import ServerFault


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """End of sequence, or a stop text."""
    LENGTH = "length"
    """`max_tokens` or the context was reached."""


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateLogprob:
    """One candidate for a token."""

    token_id: int
    text: str
    logprob: float
    """Natural logarithm of its probability."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability and its best rivals, best first."""

    logprob: float
    top: tuple[CandidateLogprob, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What an answer grew by."""

    text: str
    """May be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for, else empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token when asked for, else empty."""
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    model_version: str
    """`name@version` of what answered."""
    system_fingerprint: str
    """Names the engine; begins with `simulated` where no model was run."""
    created_unix_s: int
    replica: str
    """The replica that answered; empty where the hop did not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors in the order of the inputs."""

    vectors: tuple[tuple[float, ...], ...]
    """One per input, each with as many values as the model has dimensions."""
    usage: Usage
    request_id: str
    model_version: str
    replica: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model."""

    version: str
    share: float
    """Of the model's traffic, 0 to 1."""
    task: str
    """`generate` or `embed`."""
    backend: str
    """`vllm` or `simulated`."""
    context_tokens: int
    """Longest prompt and answer together; 0: the model's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for by its name, `name@version`, or an alias."""

    name: str
    versions: tuple[ModelVersion, ...]
    aliases: tuple[str, ...]
    """Names that stand for it or for one of its versions."""


class Assembly:
    """Collects the messages of one `Generate` call."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._header = pb.AnswerHeader()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._usage = Usage()

    def add(self, message: pb.GenerateResponse) -> Delta | None:
        """Take the next message; None when it adds nothing to the answer."""
        if message.HasField("header"):
            self._header = message.header
        if message.finish_reason:
            self._finish_reason = _FINISH_REASONS.get(message.finish_reason, FinishReason.STOP)
        if message.HasField("usage"):
            self._usage = _usage_of(message.usage)
        if not message.text_delta and not message.token_ids:
            return None
        delta = Delta(
            message.text_delta,
            tuple(message.token_ids),
            tuple(_logprobs_of(entry) for entry in message.logprobs),
        )
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        return delta

    def finish(self, trailing: Iterable[tuple[str, str | bytes]] | None) -> Answer:
        """The answer, once its stream has ended well.

        Raises:
            ServerFault: the stream ended without saying why the answer did.
        """
        if self._finish_reason is None:
            raise ServerFault(Reason.INTERNAL, "The answer ended without a finish reason.")
        return Answer(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self._finish_reason,
            usage=self._usage,
            request_id=self._header.request_id or self._request_id,
            model_version=self._header.model_version,
            system_fingerprint=self._header.system_fingerprint,
            created_unix_s=self._header.created_unix_s,
            replica=md.texts(trailing).get(md.REPLICA, ""),
        )


def embeddings_of(
    message: pb.EmbedResponse,
    trailing: Iterable[tuple[str, str | bytes]] | None,
    request_id: str,
) -> Embeddings:
    """Read the answer of `Embed`."""
    return Embeddings(
        vectors=tuple(tuple(one.values) for one in message.embeddings),
        usage=_usage_of(message.usage),
        request_id=message.header.request_id or request_id,
        model_version=message.header.model_version,
        replica=md.texts(trailing).get(md.REPLICA, ""),
    )


def models_of(catalogue: registry_pb.Catalogue) -> tuple[Model, ...]:
    """Read a catalogue, models by name."""
    return tuple(
        Model(
            name=model.name,
            versions=tuple(_version_of(model, version) for version in model.versions),
            aliases=tuple(
                alias.name
                for alias in catalogue.aliases
                if alias.target.partition("@")[0] == model.name
            ),
        )
        for model in sorted(catalogue.models, key=lambda model: model.name)
    )


def _version_of(model: registry_pb.Model, version: registry_pb.ModelVersion) -> ModelVersion:
    total = sum(entry.weight for entry in model.split)
    weight = sum(entry.weight for entry in model.split if entry.version == version.version)
    spec = version.spec
    return ModelVersion(
        version=version.version,
        share=weight / total if total else 0.0,
        task="embed" if spec.task == engine_pb.TASK_EMBED else "generate",
        backend=engine_pb.Backend.Name(spec.backend).removeprefix("BACKEND_").lower(),
        context_tokens=spec.context_tokens,
    )


def _usage_of(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _logprobs_of(entry: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        entry.logprob,
        tuple(CandidateLogprob(one.token_id, one.text, one.logprob) for one in entry.top),
    )
