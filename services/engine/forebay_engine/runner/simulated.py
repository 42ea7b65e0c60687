"""The simulated back end: the simulated engine's core in real time, behind the runner's port."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason

from forebay_engine.core import link
from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import language, openai, planner, tokenizer
from forebay_engine.core.simulated.answer import Choice, ChoiceDelta, TokenLogprob
from forebay_engine.core.simulated.kv_cache import BLOCK_TOKENS
from forebay_engine.core.simulated.openai import EmbeddingRequest, TextRequest
from forebay_engine.core.simulated.profile import Profile
from forebay_engine.runner.backend import (
    Call,
    Delta,
    Frame,
    Loaded,
    Logprob,
    Phase,
    SendFrame,
)

_STOPS_MAX = 16
_LOGPROBS_MAX = 20
_INPUTS_MAX = 2048
_SEED_STRIDE = 1_000_003
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class SimulatedBackend:
    """One simulated engine. All of it runs on the loop of the runner."""

    def __init__(self, spec: engine_pb.ModelSpec, profile: Profile, *, waiting_max: int) -> None:
        kv_tokens = profile.kv_cache_tokens
        if spec.kv_cache_bytes:
            kv_tokens = spec.kv_cache_bytes // profile.kv_token_bytes
        self._model = spec.model_version
        self._profile = profile
        self._limits = planner.Limits(
            max_sequences=spec.max_sequences or profile.max_sequences,
            context_tokens=spec.context_tokens or profile.context_tokens,
            kv_blocks=max(1, kv_tokens // BLOCK_TOKENS),
            waiting_max=waiting_max,
        )
        self._embeds = spec.task == engine_pb.TASK_EMBED
        self._fingerprint = f"simulated-{profile.name}"
        self._engine = planner.Engine(profile, self._limits)
        self._next_id = 0
        self._mailboxes: dict[int, _Mailbox] = {}
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def load(self, report: Callable[[Phase], None]) -> Loaded:
        """Take as long over each phase as the profile says."""
        profile = self._profile
        for phase, duration_ms in (
            (Phase.IMPORT, profile.import_ms),
            (Phase.ENGINE_INIT, profile.engine_init_ms),
            (Phase.WEIGHTS, profile.weights_ms),
            (Phase.WARM_UP, profile.warm_up_ms),
        ):
            if phase is not Phase.IMPORT:
                report(phase)
            await asyncio.sleep(duration_ms / 1000)
        self._stepping = asyncio.create_task(self._step_forever())
        return Loaded(
            max_sequences=self._limits.max_sequences,
            kv_cache_tokens=self._limits.kv_blocks * BLOCK_TOKENS,
            context_tokens=self._limits.longest_sequence,
            system_fingerprint=self._fingerprint,
            can_sleep=True,
        )

    async def generate(
        self, request: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[Delta, None]:
        """Answer a prompt with the simulated language."""
        self._require(embeds=False)
        options = request.sampling
        if len(options.stop) > _STOPS_MAX:
            raise _invalid("sampling.stop", f"may have at most {_STOPS_MAX} entries")
        if options.HasField("max_tokens") and options.max_tokens < 1:
            raise _invalid("sampling.max_tokens", "must be 1 or more")
        if options.HasField("logprobs") and options.logprobs > _LOGPROBS_MAX:
            raise _invalid("sampling.logprobs", f"must be at most {_LOGPROBS_MAX}")
        choice = Choice(
            index=0,
            seed=options.seed,
            stops=tuple(options.stop),
            min_tokens=options.min_tokens,
            logprobs=options.logprobs if options.HasField("logprobs") else None,
        )
        answering = self._answer(
            [_prompt_of(request)],
            [choice],
            call,
            max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
            ignore_end=options.ignore_eos,
        )
        try:
            async for deltas in answering:
                for delta in deltas:
                    yield Delta(
                        delta.text,
                        delta.tokens,
                        [_logprob(entry) for entry in delta.logprobs],
                        delta.finish.value if delta.finish else None,
                    )
        finally:
            await answering.aclose()

    async def embed(self, request: pb.EmbedRequest, call: Call) -> list[Sequence[float]]:
        """Embed texts or tokens."""
        inputs: list[Sequence[int]] = []
        for entry in request.inputs:
            kind = entry.WhichOneof("input")
            if kind is None:
                raise _invalid("inputs", "has an entry without text or token ids")
            inputs.append(
                tokenizer.encode(entry.text) if kind == "text" else list(entry.token_ids.ids)
            )
        if not 1 <= len(inputs) <= _INPUTS_MAX:
            raise _invalid("inputs", f"must have 1 to {_INPUTS_MAX} entries")
        if not all(map(tokenizer.is_vocabulary, inputs)):
            raise _invalid("inputs", "has a token id outside the vocabulary")
        return await self._embed(inputs, call)

    async def call_openai(self, path: str, body: bytes, call: Call, send: SendFrame) -> None:
        """Answer chat, completions and embeddings as the protocol shapes them."""
        try:
            request = openai.parse_request(path, body)
        except Refused as refused:
            raise _translate(refused) from None
        if isinstance(request, EmbeddingRequest):
            vectors = await self._embed(request.inputs, call)
            document = openai.embedding_document(
                self._model,
                vectors,
                as_base64=request.as_base64,
                prompt_tokens=call.prompt_tokens,
            )
            await send(Frame(document, (), _JSON, last=True))
            return
        self._require(embeds=False)
        await self._answer_text(request, call, send)

    def load_now(self) -> link.Load:
        """Return the engine's figures."""
        figures = self._engine.figures()
        return link.Load(
            running=figures.running,
            waiting=figures.waiting,
            kv_cache_usage=figures.kv_cache_usage,
            prefix_queries_tokens=figures.prefix_queries_tokens,
            prefix_hits_tokens=figures.prefix_hits_tokens,
            generated_tokens=figures.generated_tokens,
        )

    async def sleep(self) -> None:
        """Forget the KV cache, as an engine does whose memory is given up."""
        await asyncio.sleep(self._profile.sleep_ms / 1000)
        self._engine.forget_cache()

    async def wake(self) -> None:
        """Take as long as the profile says."""
        await asyncio.sleep(self._profile.wake_ms / 1000)

    async def failed(self) -> str:
        """Wait until the stepping task ends, which only a mistake of ours makes it do."""
        assert self._stepping is not None
        await asyncio.wait((self._stepping,))
        return "The simulated engine stopped."

    async def close(self) -> None:
        """End the stepping task."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait((self._stepping,))

    def _require(self, *, embeds: bool) -> None:
        if self._embeds is not embeds:
            offered = "embeddings" if self._embeds else "text"
            raise ForebayError(Reason.UNSUPPORTED, f"This model only answers with {offered}.")

    async def _answer_text(self, request: TextRequest, call: Call, send: SendFrame) -> None:
        head = openai.AnswerHead(
            kind=request.kind,
            request_id=call.request_id,
            model=self._model,
            fingerprint=self._fingerprint,
            created_unix_s=call.started_ns // 1_000_000_000,
        )
        prompts = [p for p in request.prompts for _ in range(request.choices_per_prompt)]
        choices = [
            Choice(
                index=index,
                seed=request.seed + index % request.choices_per_prompt * _SEED_STRIDE,
                stops=request.stops,
                min_tokens=request.min_tokens,
                logprobs=request.logprobs,
            )
            for index in range(len(prompts))
        ]
        answering = self._answer(
            prompts,
            choices,
            call,
            max_tokens=request.max_tokens,
            ignore_end=request.ignore_end,
            choices_per_prompt=request.choices_per_prompt,
        )
        collected: list[list[ChoiceDelta]] = [[] for _ in choices]
        opening = openai.opening_events(head, request, len(choices)) if request.stream else b""
        pending: list[tuple[int, Sequence[int]]] = []
        try:
            async for deltas in answering:
                if not request.stream:
                    for delta in deltas:
                        collected[delta.index].append(delta)
                    continue
                pending.extend((delta.index, delta.tokens) for delta in deltas)
                events = opening + openai.delta_events(head, request, deltas)
                last = all(choice.finish for choice in choices)
                if last:
                    usage = openai.usage_document(
                        call.prompt_tokens, call.completion_tokens, call.cached_tokens
                    )
                    events += openai.closing_events(head, request, usage)
                if events:
                    await send(Frame(events, pending, _EVENTS, last))
                    opening, pending = b"", []
        finally:
            await answering.aclose()
        if not request.stream:
            usage = openai.usage_document(
                call.prompt_tokens, call.completion_tokens, call.cached_tokens
            )
            document = openai.answer_document(head, request, collected, usage)
            tokens = [
                (index, [token for delta in deltas for token in delta.tokens])
                for index, deltas in enumerate(collected)
            ]
            await send(Frame(document, tokens, _JSON, last=True))

    async def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Choice],
        call: Call,
        *,
        max_tokens: int | None,
        ignore_end: bool,
        choices_per_prompt: int = 1,
    ) -> AsyncGenerator[list[ChoiceDelta], None]:
        mailbox = _Mailbox()
        by_id: dict[int, Choice] = {}
        try:
            for prompt, choice in zip(prompts, choices, strict=True):
                left = self._limits.longest_sequence - len(prompt)
                wanted = left if max_tokens is None else min(max_tokens, left)
                sequence_id = self._add(
                    prompt,
                    mailbox,
                    max_tokens=max(1, wanted),
                    min_tokens=choice.min_tokens,
                    ignore_end=ignore_end,
                    seed=choice.seed,
                )
                by_id[sequence_id] = choice
                if choice.index % choices_per_prompt == 0:
                    call.prompt_tokens += len(prompt)
            open_ids = set(by_id)
            while open_ids:
                deltas: list[ChoiceDelta] = []
                for sequence_id, emissions in await mailbox.take():
                    if sequence_id not in open_ids:
                        continue
                    choice = by_id[sequence_id]
                    delta = choice.take(emissions)
                    if choice.index % choices_per_prompt == 0:
                        call.cached_tokens += emissions[0].cached_tokens
                    call.completion_tokens += len(delta.tokens)
                    if delta.finish is not None:
                        open_ids.discard(sequence_id)
                        call.finish_reasons.append(delta.finish.value)
                        self._forget(sequence_id)
                    deltas.append(delta)
                call.last_token_ns = time.time_ns()
                if not call.first_token_ns:
                    call.first_token_ns = call.last_token_ns
                yield deltas
        finally:
            for sequence_id in by_id:
                self._forget(sequence_id)

    async def _embed(self, inputs: Sequence[Sequence[int]], call: Call) -> list[Sequence[float]]:
        self._require(embeds=True)
        mailbox = _Mailbox()
        ids: list[int] = []
        try:
            for tokens in inputs:
                # One by one: what was added must be forgotten when a later one is refused.
                ids.append(self._add(tokens, mailbox, max_tokens=0))  # noqa: PERF401
            waiting = set(ids)
            while waiting:
                for sequence_id, emissions in await mailbox.take():
                    waiting.discard(sequence_id)
                    call.cached_tokens += emissions[0].cached_tokens
        finally:
            for sequence_id in ids:
                self._forget(sequence_id)
        call.prompt_tokens = sum(map(len, inputs))
        call.first_token_ns = call.last_token_ns = time.time_ns()
        dimensions = self._profile.embedding_dimensions
        return [language.embed(tokens, dimensions=dimensions) for tokens in inputs]

    def _add(
        self,
        prompt: Sequence[int],
        mailbox: "_Mailbox",
        *,
        max_tokens: int,
        min_tokens: int = 0,
        ignore_end: bool = False,
        seed: int = 0,
    ) -> int:
        self._next_id += 1
        try:
            self._engine.add(
                planner.SequenceRequest(
                    sequence_id=self._next_id,
                    prompt=tuple(prompt),
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    ignore_end=ignore_end,
                    seed=seed,
                )
            )
        except Refused as refused:
            raise _translate(refused) from None
        self._mailboxes[self._next_id] = mailbox
        self._work.set()
        return self._next_id

    def _forget(self, sequence_id: int) -> None:
        self._engine.abort(sequence_id)
        self._mailboxes.pop(sequence_id, None)

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while True:
            step = self._engine.plan_step(now)
            if step is None:
                self._work.clear()
                await self._work.wait()
                now = loop.time()
                continue
            # A step that takes no time still lets everybody else run.
            await asyncio.sleep(max(0.0, step.ends_at - loop.time()))
            now = max(step.ends_at, loop.time() - _LAG_S)
            for emission in self._engine.apply_step():
                mailbox = self._mailboxes.get(emission.sequence_id)
                if mailbox is not None:
                    mailbox.put(emission)


# How far a late timer may lag before the simulated clock stops catching up.
_LAG_S = 0.05


class _Mailbox:
    """The emissions of one call's sequences, taken in bulk by the call."""

    def __init__(self) -> None:
        self._emissions: dict[int, list[planner.Emission]] = {}
        self._filled = asyncio.Event()

    def put(self, emission: planner.Emission) -> None:
        """Keep an emission until the call takes it; a sequence's end bounds how many there are."""
        self._emissions.setdefault(emission.sequence_id, []).append(emission)
        self._filled.set()

    async def take(self) -> list[tuple[int, list[planner.Emission]]]:
        """Wait for emissions and return all there are, by sequence."""
        await self._filled.wait()
        self._filled.clear()
        taken, self._emissions = self._emissions, {}
        return list(taken.items())


def _prompt_of(request: pb.GenerateRequest) -> Sequence[int]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return tokenizer.encode(request.text)
    if kind == "token_ids":
        tokens = list(request.token_ids.ids)
        if not tokenizer.is_vocabulary(tokens):
            raise _invalid("token_ids", "has a token id outside the vocabulary")
        return tokens
    if kind == "messages" and request.messages.messages:
        return tokenizer.encode(
            openai.render_chat((turn.role, turn.content) for turn in request.messages.messages)
        )
    raise _invalid("prompt", "is required")


def _logprob(entry: TokenLogprob) -> Logprob:
    top = tuple((token, tokenizer.decode((token,)), value) for token, value in entry.top)
    return Logprob(entry.logprob, top)


def _invalid(name: str, problem: str) -> ForebayError:
    return ForebayError(Reason.INVALID_ARGUMENT, f"'{name}' {problem}.", param=name)


def _translate(refused: Refused) -> ForebayError:
    return ForebayError(Reason(refused.reason), refused.message, param=refused.param)
