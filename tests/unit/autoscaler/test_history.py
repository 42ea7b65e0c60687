"""The history of decisions, the records of replicas, pools and what they load."""

import pytest
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_autoscaler.core.catalogue import resolve
from forebay_autoscaler.core.history import record
from forebay_autoscaler.core.model import Decision, Phase
from forebay_autoscaler.core.observe import Launched, see_replicas
from forebay_autoscaler.core.pools import ModelRef, check_pool, parse_ref, policy_of
from forebay_autoscaler.core.refusal import RefusedError


def a_decision(
    time_ms: int = 0, reason: str = "steady", desired: int = 1, *effects: str
) -> Decision:
    return Decision(
        time_unix_ms=time_ms,
        desired=desired,
        demanded=desired,
        requests=0,
        observation_age_s=0.0,
        reason=reason,
        effects=effects,
    )


def test_ticks_that_only_repeat_are_one_entry_with_the_newest_figures() -> None:
    history: tuple[Decision, ...] = ()
    for time_ms in range(5):
        history = record(history, a_decision(time_ms), limit=3)
    assert [each.time_unix_ms for each in history] == [4]


@pytest.mark.parametrize(
    "other",
    [a_decision(9, "max_replicas"), a_decision(9, "steady", 2), a_decision(9, "steady", 1, "x")],
)
def test_what_differs_is_an_entry_of_its_own(other: Decision) -> None:
    history = record(record((), a_decision(), limit=3), other, limit=3)
    assert [each.time_unix_ms for each in history] == [9, 0]
    history = record(history, a_decision(10), limit=3)
    assert [each.time_unix_ms for each in history] == [10, 9, 0]


def test_a_history_is_bounded() -> None:
    history: tuple[Decision, ...] = ()
    for time_ms in range(50):
        history = record(history, a_decision(time_ms, "steady", time_ms), limit=4)
    assert [each.time_unix_ms for each in history] == [49, 48, 47, 46]


def a_record(
    replica_id: str = "a",
    *,
    pool: str = "p",
    role: int = batcher.ROLE_ACTIVE,
    states: tuple[int, ...] = (engine.MODEL_STATE_ACTIVE,),
    draining: bool = False,
) -> batcher.Replica:
    return batcher.Replica(
        replica_id=replica_id,
        pool=pool,
        role=role,  # type: ignore[arg-type]
        draining=draining,
        models=[
            batcher.ReplicaModel(state=state, queued=2, in_flight=3)  # type: ignore[arg-type]
            for state in states
        ],
    )


@pytest.mark.parametrize(
    ("record_", "phase"),
    [
        (a_record(), Phase.ACTIVE),
        (a_record(role=batcher.ROLE_STANDBY), Phase.STANDBY),
        (a_record(states=()), Phase.STARTING),
        (a_record(states=(engine.MODEL_STATE_LOADING,)), Phase.STARTING),
        (a_record(states=(engine.MODEL_STATE_ACTIVE, engine.MODEL_STATE_FAILED)), Phase.STARTING),
        (a_record(draining=True), Phase.DRAINING),
    ],
)
def test_a_replica_is_ready_with_every_one_of_its_models(
    record_: batcher.Replica, phase: Phase
) -> None:
    (replica,) = see_replicas("p", [record_], [], frozenset())
    assert replica.phase is phase
    assert replica.requests == 5 * len(record_.models)
    assert (replica.is_owned, replica.is_announced) == (False, True)


def test_processes_and_records_of_one_replica_are_one() -> None:
    launched = [
        Launched("a", "p", 5.0, is_stopping=False),
        Launched("b", "p", 6.0, is_stopping=False),
        Launched("c", "p", 7.0, is_stopping=True),
        Launched("d", "other", 8.0, is_stopping=False),
    ]
    records = [a_record("a"), a_record("z", pool="other"), a_record("dead")]
    replicas = see_replicas("p", records, launched, frozenset({"dead"}))
    assert [(r.replica_id, r.phase, r.requests, r.is_owned) for r in replicas] == [
        ("a", Phase.ACTIVE, 5, True),
        ("b", Phase.STARTING, None, True),
        ("c", Phase.DRAINING, None, True),
    ]


def a_pool(**changes: object) -> autoscaler.Pool:
    fields: dict[str, object] = {
        "name": "p",
        "models": ["chat"],
        "max_replicas": 4,
        "min_replicas": 1,
        "target_requests_per_replica": 4,
    }
    return autoscaler.Pool(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_pool_becomes_a_policy() -> None:
    policy = policy_of(check_pool(a_pool(standby_replicas=1, scale_down_window_s=9, paused=True)))
    assert (policy.standby_replicas, policy.scale_down_window_s, policy.paused) == (1, 9.0, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": ".."},
        {"models": []},
        {"models": ["A"]},
        {"models": ["chat@"]},
        {"models": ["m"] * 65},
        {"max_replicas": 0},
        {"max_replicas": 10_001},
        {"min_replicas": 5},
        {"standby_replicas": 5},
        {"target_requests_per_replica": 0},
        {"scale_down_window_s": 90_000},
    ],
)
def test_a_wrong_pool_is_refused_with_its_field(changes: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as refused:
        check_pool(a_pool(**changes))
    assert refused.value.reason == "INVALID_ARGUMENT"
    assert refused.value.param == f"pool.{next(iter(changes))}"


def test_references_name_a_model_or_a_version_of_it() -> None:
    assert parse_ref("chat") == ModelRef("chat", None)
    assert parse_ref("chat@v1") == ModelRef("chat", "v1")
    assert all(parse_ref(bad) is None for bad in ("", "@v1", "chat@", "a@b@c", "A", ".."))


def a_model() -> registry.Model:
    model = registry.Model(name="chat", split=[registry.SplitEntry(version="v1", weight=9)])
    for version in ("v1", "v2"):
        spec = engine.ModelSpec(model_version=f"chat@{version}")
        model.versions.append(registry.ModelVersion(version=version, spec=spec))
    return model


@pytest.mark.parametrize(
    ("wanted", "versions"),
    [
        (["chat"], ["chat@v1"]),
        (["chat@v2"], ["chat@v2"]),
        (["chat", "chat@v1", "chat@v2"], ["chat@v1", "chat@v2"]),
        (["stable"], ["chat@v1"]),
        (["next"], ["chat@v2"]),
    ],
)
def test_a_pool_loads_what_gets_traffic_or_what_it_names(
    wanted: list[str], versions: list[str]
) -> None:
    aliases = {
        "stable": registry.Alias(name="stable", target="chat"),
        "next": registry.Alias(name="next", target="chat@v2"),
    }
    specs = resolve(wanted, {"chat": a_model()}, aliases)
    assert [spec.model_version for spec in specs] == versions


@pytest.mark.parametrize("wanted", ["none", "chat@v9", "chat@"])
def test_an_unknown_model_is_refused(wanted: str) -> None:
    with pytest.raises(RefusedError) as refused:
        resolve([wanted], {"chat": a_model()}, {})
    assert refused.value.reason == "MODEL_NOT_FOUND"
