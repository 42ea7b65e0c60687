"""Continuous batching, as an engine does it: plan a step, wait until it ends, apply it.

Running sequences come first, each with the tokens it has yet to compute; then waiting ones are
admitted while there are slots, blocks and tokens left in the step. A sequence that cannot grow
preempts the one admitted last, which computes its tokens again later. Prompts longer than a step
are computed in chunks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from forebay_engine.core.refusal import Refused
from forebay_engine.core.simulated import language
from forebay_engine.core.simulated.kv_cache import BLOCK_TOKENS, BlockPool, Listener
from forebay_engine.core.simulated.language import Context
from forebay_engine.core.simulated.profile import Profile
from forebay_engine.core.simulated.tokenizer import END_OF_SEQUENCE, is_beyond_ascii


class Finish(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """What an engine must know of a sequence. `max_tokens` 0 computes the prompt alone."""

    sequence_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_end: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine can take."""

    max_sequences: int
    context_tokens: int
    kv_blocks: int
    waiting_max: int

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits both the context and the cache."""
        return min(self.context_tokens, self.kv_blocks * BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A planned step. Nothing of it has happened before `ends_at`."""

    starts_at: float
    ends_at: float
    decoding: int
    prefilled: int


class Emission(NamedTuple):
    """A token that a step gave a sequence; none when only its prompt was asked for."""

    sequence_id: int
    token: int | None
    context: Context
    finish: Finish | None
    cached_tokens: int
    """Prompt tokens found in the prefix cache; on a sequence's first emission only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The engine's load, and its totals since it started."""

    running: int
    waiting: int
    kv_cache_usage: float
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    generated_tokens: int


@dataclass(slots=True, eq=False)
class _Sequence:
    request: SequenceRequest
    context: Context
    names: list[Context]
    length: int
    last: int | None
    beyond_ascii: bool
    computed: int = 0
    held: int = 0
    private: int = 0
    generated: int = 0
    cached: int = 0
    admitted: bool = False


class Engine:
    """One simulated engine. The caller owns time: it waits until a planned step ends."""

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self._profile = profile
        self._limits = limits
        self._pool = BlockPool(limits.kv_blocks)
        self._sequences: dict[int, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._in_flight: list[tuple[_Sequence, int]] = []
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._generated = 0

    def listen(self, listener: Listener) -> None:
        """Have somebody hear of what the prefix cache gets and loses."""
        self._pool.listener = listener

    def add(self, request: SequenceRequest) -> Sequence[Context]:
        """Queue a sequence, and return the names of its prompt's full blocks.

        Raises Refused: CONTEXT_LENGTH_EXCEEDED when the prompt leaves no room for a token,
        QUEUE_FULL when as many wait as may.
        """
        longest = self._limits.longest_sequence
        asked = len(request.prompt)
        if asked < 1:
            raise Refused("INVALID_ARGUMENT", "The prompt is empty.", param="prompt")
        if asked + min(request.max_tokens, 1) > longest:
            raise Refused(
                "CONTEXT_LENGTH_EXCEEDED",
                f"This model's maximum context length is {longest} tokens; the prompt has {asked}.",
            )
        if len(self._waiting) >= self._limits.waiting_max:
            raise Refused("QUEUE_FULL", f"{self._limits.waiting_max} requests wait in the engine.")
        context = language.EMPTY
        names: list[Context] = []
        for position, token in enumerate(request.prompt, start=1):
            context = language.extend(context, token)
            if position % BLOCK_TOKENS == 0:
                names.append(context)
        sequence = _Sequence(
            request=request,
            context=context,
            names=names,
            length=asked,
            last=request.prompt[-1],
            beyond_ascii=is_beyond_ascii(request.prompt),
        )
        self._sequences[request.sequence_id] = sequence
        self._waiting.append(sequence)
        return tuple(names)

    def abort(self, sequence_id: int) -> bool:
        """Forget a sequence and free its slot and blocks at once. False when it is gone already."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        if sequence.admitted:
            self._running.remove(sequence)
            self._free(sequence)
        else:
            self._waiting.remove(sequence)
        return True

    def forget_cache(self) -> None:
        """Forget every cached block that no sequence holds."""
        self._pool.forget_idle()

    def plan_step(self, now: float) -> Step | None:
        """Plan the step that begins now; None when there is nothing to do."""
        assert not self._in_flight, "the step before has not been applied"
        budget = self._profile.step_tokens
        budget, preempted = self._continue_running(budget)
        if not preempted:
            self._admit_waiting(budget)
        if not self._in_flight:
            return None
        decoding = prefilled = attended = 0
        for sequence, tokens in self._in_flight:
            if sequence.generated and tokens == 1:
                decoding += 1
                attended += sequence.computed
            else:
                prefilled += tokens
        duration_ms = self._profile.step_ms(
            decoding=decoding, prefilled=prefilled, attended=attended
        )
        return Step(
            starts_at=now,
            ends_at=now + duration_ms / 1000,
            decoding=decoding,
            prefilled=prefilled,
        )

    def apply_step(self) -> list[Emission]:
        """Apply the planned step and return what it gave; nothing to sequences aborted since."""
        emissions: list[Emission] = []
        for sequence, tokens in self._in_flight:
            if self._sequences.get(sequence.request.sequence_id) is not sequence:
                continue
            sequence.computed += tokens
            self._publish_full_blocks(sequence)
            if sequence.computed == sequence.length:
                emissions.append(self._emit(sequence))
        self._in_flight = []
        return emissions

    def figures(self) -> Figures:
        """Return the load at this moment."""
        return Figures(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_cache_usage=self._pool.used / self._pool.total,
            prefix_queries_tokens=self._prefix_queries,
            prefix_hits_tokens=self._prefix_hits,
            generated_tokens=self._generated,
        )

    def _continue_running(self, budget: int) -> tuple[int, bool]:
        preempted = False
        position = 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            tokens = min(sequence.length - sequence.computed, budget)
            while not self._grow(sequence, tokens):
                preempted = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return budget, preempted
            self._in_flight.append((sequence, tokens))
            budget -= tokens
            position += 1
        return budget, preempted

    def _admit_waiting(self, budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[0]
            known = self._pool.count_known(sequence.names[: (sequence.length - 1) // BLOCK_TOKENS])
            self._pool.hold(sequence.names[:known])
            sequence.held = known
            sequence.computed = known * BLOCK_TOKENS
            tokens = min(sequence.length - sequence.computed, budget)
            if not self._grow(sequence, tokens):
                self._free(sequence)
                return
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.admitted = True
            if not sequence.generated:
                sequence.cached = sequence.computed
                self._prefix_queries += sequence.length
                self._prefix_hits += sequence.computed
            self._in_flight.append((sequence, tokens))
            budget -= tokens

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        blocks = -(-(sequence.computed + tokens) // BLOCK_TOKENS)
        missing = blocks - sequence.held - sequence.private
        if missing > 0:
            if not self._pool.take(missing):
                return False
            sequence.private += missing
        return True

    def _publish_full_blocks(self, sequence: _Sequence) -> None:
        while (sequence.held + 1) * BLOCK_TOKENS <= sequence.computed:
            parent = sequence.names[sequence.held - 1] if sequence.held else None
            self._pool.publish(sequence.names[sequence.held], parent)
            sequence.held += 1
            sequence.private -= 1

    def _emit(self, sequence: _Sequence) -> Emission:
        request = sequence.request
        if request.max_tokens == 0:
            self._finish(sequence)
            return Emission(
                request.sequence_id, None, sequence.context, Finish.STOP, sequence.cached
            )
        context = sequence.context
        token = language.next_token(
            context,
            sequence.last,
            seed=request.seed,
            may_end=not request.ignore_end and sequence.generated >= request.min_tokens,
            beyond_ascii=sequence.beyond_ascii,
        )
        sequence.generated += 1
        sequence.length += 1
        sequence.last = token
        sequence.context = language.extend(context, token)
        if sequence.length % BLOCK_TOKENS == 0:
            sequence.names.append(sequence.context)
        self._generated += 1
        finish: Finish | None = None
        if token == END_OF_SEQUENCE:
            finish = Finish.STOP
        elif (
            sequence.generated >= request.max_tokens
            or sequence.length >= self._limits.longest_sequence
        ):
            finish = Finish.LENGTH
        if finish is not None:
            self._finish(sequence)
        cached = sequence.cached if sequence.generated == 1 else 0
        return Emission(request.sequence_id, token, context, finish, cached)

    def _finish(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.sequence_id]
        self._running.remove(sequence)
        self._free(sequence)

    def _preempt(self, sequence: _Sequence) -> None:
        self._free(sequence)
        sequence.admitted = False
        self._waiting.appendleft(sequence)

    def _free(self, sequence: _Sequence) -> None:
        self._pool.release(sequence.names[: sequence.held], private=sequence.private)
        sequence.held = sequence.private = sequence.computed = 0
