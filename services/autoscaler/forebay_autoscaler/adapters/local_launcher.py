"""Replicas as processes of this host: an engine host and a batcher each, which end together.

The processes outlive the autoscaler, and the next one in charge of the directory finds them by
their records. Each replica has one task here, which waits for the end of either process or for the
order to stop, and then leaves nothing of the replica: not the other process, not a runner that lost
its host, not a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from subprocess import Popen

from forebay_common.config import CommonConfig
from forebay_common.errors import ForebayError, Reason
from google.protobuf import json_format

from forebay_autoscaler.adapters import processes
from forebay_autoscaler.adapters.processes import ProcessRef, Watched
from forebay_autoscaler.adapters.replica_dir import Holder, ReplicaDir, ReplicaRecord
from forebay_autoscaler.config import Config
from forebay_autoscaler.core.observe import Launched
from forebay_autoscaler.launcher import LaunchOrder

_log = logging.getLogger(__name__)

MARK = "FOREBAY_REPLICA_MARK"
ENGINE = "engine"
BATCHER = "batcher"
_CARE_INTERVAL_S = 5.0
_LEFTOVER_ROUNDS = 50
_LEFTOVER_WAIT_S = 0.02
# How long the process that is left may take once its other half is dead.
_HALF_GRACE_S = 5.0
_GONE_REMEMBERED = 1000
_OTHERS_VARIABLES = ("FOREBAY_AUTOSCALER_", "FOREBAY_REGISTRY_", "FOREBAY_ROUTER_")


class LocalLauncher:
    """Runs replicas on this host. See `forebay_autoscaler.launcher.Launcher`."""

    def __init__(
        self,
        config: Config,
        common: CommonConfig,
        *,
        environ: Mapping[str, str],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._common = common
        self._environ = dict(environ)
        self._on_change = on_change
        self._dir = ReplicaDir(Path(config.state_dir))
        self._own = processes.refer(os.getpid())
        self._fence = 0
        self._replicas: dict[str, _Replica] = {}
        self._gone: deque[str] = deque(maxlen=_GONE_REMEMBERED)
        self._caring: asyncio.Task[None] | None = None

    @property
    def carries_out(self) -> bool:
        return True

    async def begin(self, fence: int) -> None:
        self._dir.prepare()
        self._check_fence(fence)
        assert self._own is not None, "this process runs"
        self._fence = fence
        self._dir.set_holder(Holder(fence, self._own))
        self._adopt()
        if self._caring is None:
            self._caring = asyncio.create_task(self._care(), name="replicas")

    def launched(self) -> tuple[Launched, ...]:
        now = time.time()
        return tuple(
            Launched(
                replica_id=replica.record.replica_id,
                pool=replica.record.pool,
                age_s=max(0.0, now - replica.record.launched_unix_s),
                is_stopping=replica.record.is_leaving or replica.stop.is_set(),
                was_active=replica.record.was_active,
            )
            for replica in self._replicas.values()
        )

    def gone(self) -> Set[str]:
        return frozenset(self._gone)

    async def launch(self, order: LaunchOrder) -> None:
        self._check_fence(self._fence)
        if order.replica_id in self._replicas:
            return
        try:
            replica = self._start(order)
        except OSError as error:
            self._gone.append(order.replica_id)
            raise ForebayError(
                Reason.LOAD_FAILED, f"A replica's processes cannot be started: {error.strerror}."
            ) from error
        self._keep(replica)
        # Whoever took over meanwhile has perhaps looked before there was anything to see.
        try:
            self._check_fence(self._fence)
        except ForebayError:
            replica.stop.set()
            raise

    def mark_leaving(self, replica_id: str, *, leaving: bool) -> None:
        if replica := self._replicas.get(replica_id):
            self._note(replica, dataclasses.replace(replica.record, is_leaving=leaving))

    def mark_active(self, replica_id: str) -> None:
        if replica := self._replicas.get(replica_id):
            self._note(replica, dataclasses.replace(replica.record, was_active=True))

    def _note(self, replica: _Replica, record: ReplicaRecord) -> None:
        replica.record = record
        with contextlib.suppress(FileNotFoundError):
            self._dir.save(replica.record)

    async def stop(self, replica_id: str) -> None:
        self._check_fence(self._fence)
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        self.mark_leaving(replica_id, leaving=True)
        replica.stop.set()
        await replica.gone.wait()

    async def close(self, *, stop_replicas: bool) -> None:
        if self._caring is not None:
            self._caring.cancel()
            await asyncio.wait({self._caring})
        if stop_replicas and self._is_in_charge():
            self._adopt()
            for replica in self._replicas.values():
                replica.stop.set()
            await asyncio.gather(*(each.gone.wait() for each in self._replicas.values()))
        for replica_id in list(self._replicas):
            await self._let_go(replica_id)

    def _check_fence(self, fence: int) -> None:
        """Refuse to act beside somebody else who was put in charge later.

        A holder that is dead has no say: etcd may have been set up anew, and counts from 1.
        """
        holder = self._dir.holder()
        if holder is None or holder.process == self._own or holder.fence <= fence:
            return
        if processes.is_running(holder.process):
            raise ForebayError(
                Reason.STALE_FENCE, f"The order has fence {fence}; {holder.fence} is in charge."
            )

    def _is_in_charge(self) -> bool:
        holder = self._dir.holder()
        return holder is not None and holder.process == self._own

    def _start(self, order: LaunchOrder) -> _Replica:
        record = ReplicaRecord(
            replica_id=order.replica_id,
            pool=order.pool,
            launched_unix_s=time.time(),
            mark=f"{order.replica_id}:{secrets.token_hex(8)}",
            socket_dir=self._dir.create(
                order.replica_id,
                longest_name=max((len(spec.model_version) for spec in order.specs), default=0),
            ),
            processes={},
        )
        children: dict[str, Popen[bytes]] = {}
        refs: dict[str, ProcessRef] = {}
        try:
            self._dir.save(record)
            for part, command, environ in self._parts(order, record):
                log = self._dir.log(order.replica_id, part)
                children[part] = processes.spawn(command, environ, log)
                ref = processes.refer(children[part].pid)
                if ref is not None:
                    refs[part] = ref
            record = dataclasses.replace(record, processes=refs)
            self._dir.save(record)
        except OSError:
            for child in children.values():
                child.kill()
                child.wait()
            self._dir.remove(record)
            raise
        return _Replica(record, {p: Watched(ref, children[p]) for p, ref in refs.items()})

    def _parts(
        self, order: LaunchOrder, record: ReplicaRecord
    ) -> tuple[tuple[str, tuple[str, ...], dict[str, str]], ...]:
        config, common = self._config, self._common
        address = f"unix:{record.socket_dir}/engine.sock"
        shared = {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(_OTHERS_VARIABLES)
        }
        shared |= {
            MARK: record.mark,
            "FOREBAY_ETCD_ENDPOINTS": ",".join(common.etcd_endpoints),
            "FOREBAY_NAMESPACE": common.namespace,
            "FOREBAY_LEASE_TTL_S": f"{common.lease_ttl_s:g}",
            "FOREBAY_DRAIN_TIMEOUT_S": f"{common.drain_timeout_s:g}",
            "FOREBAY_LOG_LEVEL": common.log_level,
            "FOREBAY_INSTANCE_ID": order.replica_id,
        }
        for variable in ("FOREBAY_ENGINE_METRICS_LISTEN", "FOREBAY_BATCHER_METRICS_LISTEN"):
            # One port cannot serve every replica of a host.
            if host := shared.get(variable, "").rpartition(":")[0]:
                shared[variable] = f"{host}:0"
        engine = shared | {
            "FOREBAY_ENGINE_LISTEN": address,
            "FOREBAY_ENGINE_SOCKET_DIR": record.socket_dir,
            "FOREBAY_ENGINE_LOAD": json.dumps([json_format.MessageToDict(s) for s in order.specs]),
        }
        batcher = shared | {
            "FOREBAY_BATCHER_LISTEN": f"{config.replica_host}:0",
            "FOREBAY_BATCHER_ENGINE_ADDRESS": address,
            "FOREBAY_BATCHER_POOL": order.pool,
            "FOREBAY_BATCHER_ROLE": "standby",
            "FOREBAY_BATCHER_REPLICA_ID": order.replica_id,
        }
        return (
            (ENGINE, config.engine_command or (sys.executable, "-m", "forebay_engine"), engine),
            (BATCHER, config.batcher_command or (sys.executable, "-m", "forebay_batcher"), batcher),
        )

    def _adopt(self) -> None:
        """Take over what earlier ones have launched, or half launched, and is not known here."""
        for record in self._dir.records():
            if record.replica_id in self._replicas:
                continue
            _log.info("replica %s was launched earlier and is taken over", record.replica_id)
            self._keep(_Replica(record, {p: Watched(r) for p, r in record.processes.items()}))

    def _keep(self, replica: _Replica) -> None:
        replica_id = replica.record.replica_id
        self._replicas[replica_id] = replica
        replica.task = asyncio.create_task(self._follow(replica), name=f"replica {replica_id}")
        self._on_change()

    async def _follow(self, replica: _Replica) -> None:
        """Wait for a reason to end the replica, and end it."""
        replica_id = replica.record.replica_id
        waits = [asyncio.create_task(replica.stop.wait())]
        waits += [asyncio.create_task(part.ended.wait()) for part in replica.parts.values()]
        try:
            if len(replica.parts) == 2:
                await asyncio.wait(waits, return_when="FIRST_COMPLETED")
            is_ordered = replica.stop.is_set()
            if not is_ordered and not self._is_in_charge():
                return
            replica.stop.set()
            if not is_ordered:
                dead = [name for name, part in replica.parts.items() if part.ended.is_set()]
                _log.warning("replica %s lost its %s", replica_id, " and ".join(dead) or "record")
            self._on_change()
            await self._end(
                replica, grace_s=self._config.stop_grace_s if is_ordered else _HALF_GRACE_S
            )
            self._dir.remove(replica.record)
            self._gone.append(replica_id)
            _log.info("replica %s is gone", replica_id)
        finally:
            for wait in waits:
                wait.cancel()
            self._replicas.pop(replica_id, None)
            replica.forget()
            replica.gone.set()
            self._on_change()

    async def _end(self, replica: _Replica, *, grace_s: float) -> None:
        """End the batcher, which drains, then the engine host, then whatever is left."""
        for part in (BATCHER, ENGINE):
            process = replica.parts.get(part)
            if process is None:
                continue
            process.send(signal.SIGTERM)
            if not await process.wait(grace_s):
                _log.warning("the %s of %s is killed", part, replica.record.replica_id)
                process.send(signal.SIGKILL)
        sessions = list(replica.record.processes.values())
        for _ in range(_LEFTOVER_ROUNDS):
            left = processes.find_leftovers(sessions, MARK, replica.record.mark)
            if not left:
                return
            for ref in left:
                processes.kill(ref)
            await asyncio.sleep(_LEFTOVER_WAIT_S)
        _log.error("%s left processes that cannot be killed", replica.record.replica_id)

    async def _let_go(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.task is not None:
            replica.task.cancel()
            await asyncio.wait({replica.task})

    async def _care(self) -> None:
        """Now and then: cut logs, and find what an earlier leader launched after we looked."""
        while True:
            await asyncio.sleep(_CARE_INTERVAL_S)
            try:
                if not self._is_in_charge():
                    for replica_id in list(self._replicas):
                        await self._let_go(replica_id)
                    continue
                self._adopt_late()
                self._dir.trim_logs(
                    set(self._replicas),
                    bytes_max=self._config.log_bytes_max,
                    kept=self._config.logs_kept,
                )
            except OSError:
                _log.exception("the directory of replicas cannot be looked after")

    def _adopt_late(self) -> None:
        now = time.time()
        unknown = [r for r in self._dir.records() if r.replica_id not in self._replicas]
        # A launch under way elsewhere has no numbers yet, and is given the time to get them.
        if any(r.processes or now - r.launched_unix_s > _CARE_INTERVAL_S for r in unknown):
            self._adopt()


class _Replica:
    """A replica that this launcher looks after."""

    def __init__(self, record: ReplicaRecord, parts: Mapping[str, Watched]) -> None:
        self.record = record
        self.parts = parts
        self.stop = asyncio.Event()
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def forget(self) -> None:
        for part in self.parts.values():
            part.forget()
