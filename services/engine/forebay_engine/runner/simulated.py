"""The simulated back end: the simulated engine's core in real time, behind the runner's port."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason

from forebay_engine.core import link
from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import language, openai, planner, scoring, tokenizer
from forebay_engine.core.simulated.answer import Choice, ChoiceDelta, TokenLogprob
from forebay_engine.core.simulated.kv_cache import BLOCK_TOKENS
from forebay_engine.core.simulated.openai import EmbeddingRequest, TextRequest
from forebay_engine.core.simulated.profile import Profile
from forebay_engine.core.simulated.scoring import OtherRequest, TextOfRequest, TokensRequest
from forebay_engine.runner.backend import (
    Call,
    Delta,
    Frame,
    Loaded,
    Logprob,
    Mode,
    Phase,
    SendFrame,
)
from forebay_engine.runner.cache_report import CacheReport

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
        self._sequences: dict[int, _Sequence] = {}
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._report: CacheReport | None = None

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

    def report_cache(self, report: CacheReport) -> None:
        """Tell of what the simulated cache gets and loses."""
        if report.is_wanted and not self._embeds:
            self._report = report
            self._engine.listen(_Listener(report))
            report.begin()

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
        answer = self._begin(
            [_prompt_of(request)],
            [choice],
            call,
            max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
            ignore_end=options.ignore_eos,
        )
        try:
            while choice.finish is None or answer.grown:
                if (waiter := answer.waiter()) is not None:
                    await waiter
                for _, text, tokens, logprobs, finish in answer.take():
                    yield Delta(
                        text,
                        tokens,
                        [_logprob(entry) for entry in logprobs] if logprobs else (),
                        finish.value if finish else None,
                    )
        finally:
            self._end(answer)

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
        """Answer what the simulated engine offers as the protocol shapes it."""
        try:
            other = scoring.parse_other(path, body)
            if other is not None:
                document = await self._answer_other(other, call)
                await send(Frame(document, (), _JSON, last=True))
                return
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

    async def _answer_other(self, request: OtherRequest, call: Call) -> bytes:
        if isinstance(request, TokensRequest):
            return scoring.tokens_document(request, context_tokens=self._limits.longest_sequence)
        if isinstance(request, TextOfRequest):
            return scoring.text_document(request)
        vectors = await self._embed(request.inputs, call)
        return scoring.score_document(
            request,
            vectors,
            answer_id=call.request_id,
            model=self._model,
            created_unix_s=call.started_ns // 1_000_000_000,
            prompt_tokens=call.prompt_tokens,
        )

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
        answer = self._begin(
            prompts,
            choices,
            call,
            max_tokens=request.max_tokens,
            ignore_end=request.ignore_end,
            choices_per_prompt=request.choices_per_prompt,
            whole=not request.stream,
        )
        try:
            if request.stream:
                await self._stream_text(openai.EventWriter(head, request), answer, call, send)
                return
            if (waiter := answer.waiter()) is not None:
                await waiter
            wholes = sorted(answer.take())
        finally:
            self._end(answer)
        document = openai.answer_document(head, request, wholes, _usage_document(call))
        tokens = [(whole.choice, whole.tokens) for whole in wholes]
        await send(Frame(document, tokens, _JSON, last=True))

    async def _stream_text(
        self, writer: openai.EventWriter, answer: "_Answer", call: Call, send: SendFrame
    ) -> None:
        events = writer.opening(answer.choices)
        tokens: list[tuple[int, Sequence[int]]] = []
        last = False
        while not last:
            if (waiter := answer.waiter()) is not None:
                await waiter
            deltas = answer.take()
            events += writer.deltas(deltas)
            tokens += [(delta.choice, delta.tokens) for delta in deltas]
            last = call.generating == 0
            if last:
                events += writer.closing(_usage_document(call))
            # Tokens of a character that is not complete leave with what completes it.
            if events:
                await send(Frame(events, tokens, _EVENTS, last))
                events, tokens = b"", []

    async def _embed(self, inputs: Sequence[Sequence[int]], call: Call) -> list[Sequence[float]]:
        self._require(embeds=True)
        choices = [Choice(index=index, seed=0) for index in range(len(inputs))]
        answer = self._begin(inputs, choices, call, max_tokens=0, whole=True)
        try:
            if (waiter := answer.waiter()) is not None:
                await waiter
        finally:
            self._end(answer)
        dimensions = self._profile.embedding_dimensions
        return [language.embed(tokens, dimensions=dimensions) for tokens in inputs]

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Choice],
        call: Call,
        *,
        max_tokens: int | None,
        ignore_end: bool = False,
        choices_per_prompt: int = 1,
        whole: bool = False,
    ) -> "_Answer":
        """Give the engine one sequence per choice. The answer must be ended, whatever happens."""
        answer = _Answer(call, choices=len(choices), whole=whole)
        try:
            for prompt, choice in zip(prompts, choices, strict=True):
                left = max(1, self._limits.longest_sequence - len(prompt))
                wanted = left if max_tokens is None else min(max_tokens, left)
                is_first = choice.index % choices_per_prompt == 0
                if is_first:
                    call.prompt_tokens += len(prompt)
                delivered = answer.take_up(choice, prompt, wanted, ignore_end=ignore_end)
                if choice.finish is not None:
                    continue
                self._next_id += 1
                blocks = self._engine.add(
                    planner.SequenceRequest(
                        sequence_id=self._next_id,
                        prompt=(*prompt, *delivered),
                        max_tokens=wanted - len(delivered),
                        min_tokens=max(0, choice.min_tokens - len(delivered)),
                        ignore_end=ignore_end,
                        seed=choice.seed,
                    )
                )
                self._sequences[self._next_id] = _Sequence(
                    answer, choice, len(prompt) if is_first else 0
                )
                answer.sequence_ids.append(self._next_id)
                call.begin_sequence()
                if self._report is not None:
                    self._note_prompt(self._report, call, len(prompt), blocks)
        except Refused as refused:
            self._end(answer)
            raise _translate(refused) from None
        self._work.set()
        return answer

    def _note_prompt(
        self, report: CacheReport, call: Call, tokens: int, blocks: Sequence[int]
    ) -> None:
        # What was delivered of an answer follows upon the prompt.
        of_prompt = blocks[: tokens // BLOCK_TOKENS]
        report.ran(call, tokens=tokens, blocks=lambda: of_prompt, block_tokens=BLOCK_TOKENS)

    def _end(self, answer: "_Answer") -> None:
        for sequence_id in answer.sequence_ids:
            self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        if self._sequences.pop(sequence_id, None) is not None:
            self._engine.abort(sequence_id)

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
            now_ns = time.time_ns()
            # All of a step in one turn of the loop: then all its streams are written in the next.
            for emission in self._engine.apply_step():
                sequence = self._sequences.get(emission.sequence_id)
                if sequence is not None and sequence.answer.add(sequence, emission, now_ns):
                    self._forget(emission.sequence_id)


# How far a late timer may lag before the simulated clock stops catching up.
_LAG_S = 0.05


class _Listener:
    """Passes on what the simulated cache gets and loses."""

    def __init__(self, report: CacheReport) -> None:
        self._report = report
        self._cache = report.cache

    def stored(self, block: int, parent: int | None) -> None:
        """See `kv_cache.Listener`."""
        self._cache.stored(block, parent)
        self._report.wake()

    def removed(self, block: int) -> None:
        """See `kv_cache.Listener`."""
        self._cache.removed(block)
        self._report.wake()


class _Sequence(NamedTuple):
    """Where the tokens of a sequence go."""

    answer: "_Answer"
    choice: Choice
    prompt_tokens: int
    """Of these the ones that were cached are counted: 0 but for the first choice of a prompt."""


class _Answer:
    """What the sequences of one call give until the call takes it.

    A `whole` answer is taken once, when all of them have ended.
    """

    def __init__(self, call: Call, *, choices: int, whole: bool) -> None:
        self.choices = choices
        self.sequence_ids: list[int] = []
        self.grown: dict[int, Choice] = {}
        self._call = call
        self._whole = whole
        # Kept, because to ask for it is a system call in some versions of Python.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def add(self, sequence: _Sequence, emission: planner.Emission, now_ns: int) -> bool:
        """Take in what a step gave. Returns whether the sequence has ended."""
        call, choice = self._call, sequence.choice
        choice.add(emission)
        self.grown[choice.index] = choice
        if emission.cached_tokens and sequence.prompt_tokens:
            # What was delivered of an answer may be cached as well, but is no part of the prompt.
            call.cached_tokens += min(emission.cached_tokens, sequence.prompt_tokens)
        if emission.token is not None:
            call.completion_tokens += 1
        call.last_token_ns = now_ns
        if not call.first_token_ns:
            call.first_token_ns = now_ns
        if choice.finish is not None:
            if emission.token is not None:
                call.finish_reasons.append(choice.finish.value)
            call.end_sequence()
        waiter = self._waiter
        if waiter is not None and self._is_ready():
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        return choice.finish is not None

    def take_up(
        self, choice: Choice, prompt: Sequence[int], most: int, *, ignore_end: bool
    ) -> Sequence[int]:
        """Let a choice grow by the tokens that were delivered of it, and return them.

        Every state of an answer is a function of its tokens here, so that is all there is to it.
        Raises Refused: no answer to this prompt has these tokens.
        """
        call = self._call
        resumption = call.resumption
        delivered = resumption.tokens.get(choice.index, ()) if resumption is not None else ()
        if resumption is not None:
            resumption.mode = Mode.PREFILL
        if not delivered:
            return delivered
        if not tokenizer.is_vocabulary(delivered):
            raise Refused("INVALID_ARGUMENT", "'resume' has a token id outside the vocabulary.")
        context = language.fold(prompt)
        for count, token in enumerate(delivered, start=1):
            finish: planner.Finish | None = None
            if token == tokenizer.END_OF_SEQUENCE and not ignore_end:
                finish = planner.Finish.STOP
            elif count >= most:
                finish = planner.Finish.LENGTH
            if choice.finish is not None:
                raise Refused("UNSUPPORTED", "The answer ends before what was delivered of it.")
            choice.add(planner.Emission(0, token, context, finish, 0))
            context = language.extend(context, token)
        self.grown[choice.index] = choice
        call.completion_tokens += len(delivered)
        if choice.finish is not None:
            call.finish_reasons.append(choice.finish.value)
        return delivered

    def waiter(self) -> asyncio.Future[None] | None:
        """Return what to await before there is something to take; None when there is already.

        A future and not a coroutine: that is one frame less for each token.
        """
        if self._is_ready():
            return None
        self._waiter = self._loop.create_future()
        return self._waiter

    def take(self) -> list[ChoiceDelta]:
        """Return all there is."""
        grown, self.grown = self.grown, {}
        return [choice.take() for choice in grown.values()]

    def _is_ready(self) -> bool:
        return not self._call.generating if self._whole else bool(self.grown)


def _usage_document(call: Call) -> dict[str, Any]:
    return openai.usage_document(call.prompt_tokens, call.completion_tokens, call.cached_tokens)


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
