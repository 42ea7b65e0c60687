"""Keeps one model version: one owner of its runner, from its start until it is unloaded.

A keeper starts the runner, follows its link, tells the board what changed, and starts it again
after it died, with a growing pause. A runner serves only after its canary answer was found to be
right.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.engine.v1 import engine_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason
from google.protobuf import json_format

from forebay_engine.adapters.canaries import CanaryStore
from forebay_engine.adapters.runner_process import RunnerProcess
from forebay_engine.board import Board
from forebay_engine.config import Config
from forebay_engine.core import link
from forebay_engine.core.backoff import restart_delay_s
from forebay_engine.core.canary import Canary, agrees, is_answer
from forebay_engine.core.lifecycle import Event, State, next_state

_log = logging.getLogger(__name__)
# How long a runner's death may stay unpublished while its exit code is awaited.
_EXIT_CODE_WAIT_S = 0.02


@dataclass(slots=True, eq=False)
class Attempt:
    """One load, from a runner's start or waking until it is settled. Times: the loop's."""

    began_at: float
    timeline: list[tuple[int, float]] = field(default_factory=list)
    ended_at: float | None = None
    outcome: State | None = None
    reason: str = ""

    def durations(self) -> list[pb.PhaseDuration]:
        """Return the phases that have ended, in order."""
        ends = [at for _, at in self.timeline[1:]]
        if self.ended_at is not None:
            ends.append(self.ended_at)
        return [
            pb.PhaseDuration(
                phase=pb.LoadPhase.ValueType(phase), duration_ms=round((end - at) * 1000)
            )
            for (phase, at), end in zip(self.timeline, ends, strict=False)
        ]

    def elapsed_ms(self, now: float) -> int:
        """Return how long it has taken so far, or took."""
        return round(((self.ended_at or now) - self.began_at) * 1000)


class Keeper:
    """One model version on this host."""

    def __init__(
        self,
        spec: pb.ModelSpec,
        *,
        identity: str,
        socket_dir: Path,
        canaries: CanaryStore,
        board: Board,
        config: Config,
        environ: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.state = State.COLD
        self.attempt = Attempt(began_at=0.0)
        self.stopping = False
        self._identity = identity
        self._socket_dir = socket_dir
        self._canaries = canaries
        self._board = board
        self._config = config
        self._environ = environ
        self._reason = ""
        self._since = 0.0
        self._generation = 0
        self._restarts = 0
        self._ready: link.Ready | None = None
        self._load = link.Load()
        self._load_at = 0.0
        self._process: RunnerProcess | None = None
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the runner and keep it running; returns at once."""
        self._begin_attempt()
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.model_version}")

    def ensure_loading(self) -> Attempt:
        """See that the version will serve: join its load, resume, wake or restart it."""
        match self.state:
            case State.DRAINING:
                self._abandon_answers(Reason.CONFLICT, "The version was resumed meanwhile.")
                self._send("serve")
                self._apply(Event.RESUME)
            case State.SLEEPING:
                self._begin_wake()
            case State.FAILED:
                self._begin_attempt()
                self._restart.set()
        return self.attempt

    async def drain(self) -> None:
        """Refuse new requests and wait until none is left."""
        self._require(State.ACTIVE, State.DRAINING)
        await self._drain()

    async def sleep(self) -> None:
        """Drain, then move the weights out of device memory."""
        if self.state is State.SLEEPING:
            return
        self._require(State.ACTIVE, State.DRAINING)
        if self._ready is None or not self._ready.can_sleep:
            raise ForebayError(Reason.UNSUPPORTED, "This device or back end cannot sleep.")
        await self._drain()
        try:
            await self._command("sleep")
        except ForebayError:
            if self.state is State.DRAINING:
                self._send("serve")
                self._apply(Event.RESUME)
            raise
        if self.state is State.DRAINING:
            self._apply(Event.SLEPT)

    async def wake(self) -> None:
        """Bring the weights back and verify the answer."""
        if self.state is State.ACTIVE:
            return
        self._require(State.SLEEPING)
        attempt = self._begin_wake()
        with self._board.subscribe() as changes:
            while attempt.outcome is None:
                await changes.wait(load_not_before=float("inf"))
        if attempt.outcome is not State.ACTIVE:
            raise ForebayError(Reason.LOAD_FAILED, attempt.reason)

    async def unload(self, grace_s: float) -> None:
        """Drain for up to `grace_s`, end the runner, and return when its processes are gone."""
        assert self._task is not None
        if not self.stopping:
            self.stopping = True
            if self.state is State.LOADING and self._process is not None:
                self._process.kill()
            elif self.state in (State.ACTIVE, State.DRAINING):
                with contextlib.suppress(TimeoutError, ForebayError):
                    async with asyncio.timeout(grace_s):
                        await self._drain()
            self._restart.set()
            if self._process is not None:
                self._send("stop")
                if not await self._process.died(self._config.stop_timeout_s):
                    _log.warning("%s: killed, it did not stop", self.spec.model_version)
                    self._process.kill()
        await asyncio.wait((self._task,))

    def status(self, now: float) -> pb.ModelStatus:
        """Return what watches are told."""
        status = pb.ModelStatus(
            spec=self.spec,
            state=pb.ModelState.ValueType(self.state.value),
            reason=self._reason,
            restarts=self._restarts,
            phases=self.attempt.durations(),
            generation=self._generation,
        )
        if self.state is State.LOADING and self.attempt.timeline:
            status.phase = pb.LoadPhase.ValueType(self.attempt.timeline[-1][0])
        if self._process is not None:
            status.runner_pid = self._process.pid
            status.socket_path = str(self._socket_path())
        if self._ready is not None:
            status.limits.max_sequences = self._ready.max_sequences
            status.limits.kv_cache_tokens = self._ready.kv_cache_tokens
            status.limits.context_tokens = self._ready.context_tokens
            load = self._load
            status.load.running = load.running
            status.load.waiting = load.waiting
            status.load.kv_cache_usage = load.kv_cache_usage
            status.load.prefix_queries_tokens = load.prefix_queries_tokens
            status.load.prefix_hits_tokens = load.prefix_hits_tokens
            status.load.generated_tokens = load.generated_tokens
            status.load.age_ms = max(0, round((now - self._load_at) * 1000))
        return status

    def resumed(self) -> dict[str, int]:
        """Return how many answers its runner has taken up, by mode."""
        return {"prefill": self._load.resumed_by_prefill, "replay": self._load.resumed_by_replay}

    async def _drain(self) -> None:
        if self.state is State.ACTIVE:
            self._apply(Event.DRAIN)
        await self._command("drain")

    async def _keep(self) -> None:
        try:
            await self._keep_alive()
        except Exception:
            _log.exception("%s: its keeper failed", self.spec.model_version)
            self.stopping = True
            if self._process is not None:
                await self._process.reap(self._config.stop_timeout_s)
                self._process = None
            self._settle(Event.DIED, "The host lost track of the runner.")

    async def _keep_alive(self) -> None:
        failures = 0
        while True:
            served_s = await self._live()
            if self.stopping:
                break
            failures = 1 if served_s >= self._config.restart_most_s else failures + 1
            delay_s = restart_delay_s(
                failures,
                first_s=self._config.restart_first_s,
                most_s=self._config.restart_most_s,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._restart.wait()
            self._restart.clear()
            if self.stopping:
                break
            self._restarts += 1
            if self.attempt.outcome is not None:
                self._begin_attempt()
        self._apply(Event.STOPPED)

    async def _live(self) -> float:
        """Run one runner until it is gone; return how long it served, in seconds."""
        self._generation += 1
        self._apply(Event.START)
        loop = asyncio.get_running_loop()
        served_from: float | None = None
        failure = ""
        try:
            process = await RunnerProcess.spawn(self.spec.model_version, self._environ)
        except OSError as error:
            self._settle(Event.DIED, f"The runner could not be started: {error.strerror}.")
            return 0.0
        self._process = process
        process.send(
            link.Start(json_format.MessageToJson(self.spec, indent=None), str(self._socket_path()))
        )
        try:
            async with asyncio.timeout(self._config.load_timeout_s) as limit:
                while (message := await process.read()) is not None:
                    if problem := await self._hear(message):
                        failure = problem
                        process.kill()
                    if served_from is None and self.state is State.ACTIVE:
                        served_from = loop.time()
                        limit.reschedule(None)
        except TimeoutError:
            failure = f"The load took longer than {self._config.load_timeout_s:g} s."
            process.kill()
        ended = await process.died(_EXIT_CODE_WAIT_S)
        self._abandon_answers(Reason.MODEL_NOT_LOADED, "The runner ended meanwhile.")
        self._ready = None
        if not self.stopping:
            how = process.how_it_ended() if ended else "The runner died."
            self._settle(Event.DIED, failure or how)
        await process.reap(self._config.stop_timeout_s)
        self._process = None
        with contextlib.suppress(OSError):
            self._socket_path().unlink()
        return 0.0 if served_from is None else loop.time() - served_from

    async def _hear(self, message: link.FromRunner) -> str:
        """Take in a message; return why the runner must end, if it must."""
        match message:
            case link.Phase(phase):
                self._enter_phase(phase)
            case link.Load():
                self._load = message
                self._load_at = asyncio.get_running_loop().time()
                self._board.load_changed()
            case link.Ready():
                return await self._verify(message)
            case link.Done(command):
                self._answer(command, None)
            case link.Refused(command, reason, text):
                self._answer(command, ForebayError(Reason(reason), text))
                if command == "wake":
                    return text
            case link.Failed(reason):
                return reason
        return ""

    async def _verify(self, ready: link.Ready) -> str:
        answer = Canary(tokens=ready.canary_tokens, vector=ready.canary_vector)
        if not is_answer(answer):
            return "The canary prompt got no usable answer."
        recorded = await asyncio.to_thread(self._canaries.find, self._identity)
        if recorded is None:
            await asyncio.to_thread(self._canaries.record, self._identity, answer)
        elif not agrees(recorded, answer):
            return "The canary prompt got another answer than was recorded for this artifact."
        self._ready = ready
        self._load = link.Load()
        self._load_at = asyncio.get_running_loop().time()
        if self.state is State.LOADING and not self.stopping:
            self._send("serve")
            self._settle(Event.VERIFIED, "")
        return ""

    def _begin_attempt(self) -> None:
        self.attempt = Attempt(began_at=asyncio.get_running_loop().time())
        self.attempt.timeline.append((pb.LOAD_PHASE_PROCESS, self.attempt.began_at))

    def _begin_wake(self) -> Attempt:
        self.attempt = Attempt(began_at=asyncio.get_running_loop().time())
        self._apply(Event.WAKE)
        self._send("wake")
        return self.attempt

    def _enter_phase(self, phase: int) -> None:
        self.attempt.timeline.append((phase, asyncio.get_running_loop().time()))
        self._board.state_changed()

    def _settle(self, event: Event, reason: str) -> None:
        """Apply an event that ends a load, if one is under way."""
        if self.attempt.outcome is None:
            self.attempt.ended_at = asyncio.get_running_loop().time()
            self.attempt.reason = reason
            self.attempt.outcome = next_state(self.state, event)
        self._apply(event, reason)

    def _apply(self, event: Event, reason: str = "") -> None:
        before, self.state = self.state, next_state(self.state, event)
        now = asyncio.get_running_loop().time()
        passed_ms = round((now - (self._since or now)) * 1000)
        self._since = now
        self._reason = reason
        level = logging.WARNING if self.state is State.FAILED else logging.INFO
        _log.log(
            level,
            "%s: %s -> %s after %d ms%s",
            self.spec.model_version,
            before.name,
            self.state.name,
            passed_ms,
            f": {reason}" if reason else "",
        )
        self._board.state_changed()

    def _require(self, *states: State) -> None:
        if self.stopping:
            raise ForebayError(Reason.MODEL_NOT_LOADED, "The version is being unloaded.")
        if self.state not in states:
            raise ForebayError(
                Reason.MODEL_NOT_LOADED,
                f"The version is {self.state.name}, which does not allow it.",
            )

    def _send(self, command: str) -> None:
        if self._process is not None:
            self._process.send(link.Command(command))

    async def _command(self, name: str) -> None:
        """Send a command, or join the same one under way, and wait for its end."""
        future = self._answers.get(name)
        if future is None:
            future = self._answers[name] = asyncio.get_running_loop().create_future()
            # A command nobody waits for any more may still fail; that is no one's error then.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._send(name)
        await asyncio.shield(future)

    def _answer(self, command: str, error: ForebayError | None) -> None:
        future = self._answers.pop(command, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _abandon_answers(self, reason: Reason, message: str) -> None:
        for command in list(self._answers):
            self._answer(command, ForebayError(reason, message))

    def _socket_path(self) -> Path:
        return self._socket_dir / f"{self.spec.model_version}.{self._generation}.sock"
