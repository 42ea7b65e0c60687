"""Which processes make up a local fleet, and what each is told."""

import json
from typing import Any

import pytest
from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler_pb
from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.registry.v1 import registry_service_pb2 as registry_pb
from forebay_client.fleet.config import drain_timeout_s
from forebay_client.fleet.core import plan
from forebay_client.traces.core.bars import bar
from google.protobuf import json_format

_ADDRESSES = plan.Addresses(
    router_grpc="h:1",
    router_http="h:2",
    registry="h:3",
    autoscaler="h:4",
    etcd=("h:5",),
    spans="h:6",
)


def some_options(**changes: Any) -> plan.Options:
    model = plan.ModelPlan("m", "vllm", artifact_path="/models/m", context_tokens=2048)
    embedding = plan.ModelPlan("e", "simulated", profile="instant", embeds=True)
    fields: dict[str, Any] = {
        "models": (model, embedding),
        "replicas": 1,
        "max_replicas": 3,
        "warm": 1,
        "grpc_port": 0,
        "http_port": 0,
        **changes,
    }
    return plan.Options(**fields)


def the_plans() -> dict[str, plan.ServicePlan]:
    plans = plan.services(
        some_options(), _ADDRESSES, python="python", state_dir="/s", stop_grace_s=9
    )
    return {one.name: one for one in plans}


def the_environment(**environ: str) -> dict[str, str]:
    return plan.environment(
        _ADDRESSES, some_options(), state_dir="/s", drain_timeout_s=10, environ=environ
    )


def test_callers_are_turned_away_before_what_serves_them_goes() -> None:
    assert list(reversed(the_plans())) == ["router", "autoscaler", "registry"]


def test_what_the_services_are_told_is_in_their_own_contracts() -> None:
    plans = the_plans()
    puts = [
        json_format.ParseDict(put, registry_pb.PutVersionRequest())
        for put in json.loads(plans["registry"].env["FOREBAY_REGISTRY_BOOTSTRAP"])
    ]
    assert [put.model for put in puts] == ["m", "e"]
    assert puts[0].version.spec.backend == engine_pb.BACKEND_VLLM
    assert puts[0].version.spec.context_tokens == 2048
    assert puts[1].version.spec.task == engine_pb.TASK_EMBED
    (pool,) = (
        json_format.ParseDict(pool, autoscaler_pb.Pool())
        for pool in json.loads(plans["autoscaler"].env["FOREBAY_AUTOSCALER_BOOTSTRAP"])
    )
    assert list(pool.models) == ["m@1", "e@1"]
    assert (pool.min_replicas, pool.max_replicas, pool.standby_replicas) == (1, 3, 1)


def test_spans_go_to_the_fleets_own_store() -> None:
    told = the_environment(HOME="/root", FOREBAY_INSTANCE_ID="mine")
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://h:6"
    assert told["HOME"] == "/root"
    assert told["FOREBAY_ETCD_ENDPOINTS"] == "h:5"
    assert "FOREBAY_INSTANCE_ID" not in told


def test_the_users_own_back_end_is_left_alone() -> None:
    assert plan.exports_elsewhere({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert not plan.exports_elsewhere({"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
    elsewhere = plan.Addresses("a", "b", "c", "d", ("e",), spans="")
    told = plan.environment(
        elsewhere,
        some_options(),
        state_dir="/s",
        drain_timeout_s=10,
        environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
    )
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://x"


def test_a_local_fleet_stops_sooner_unless_it_is_told_otherwise() -> None:
    assert drain_timeout_s({}) == 10
    assert drain_timeout_s({"FOREBAY_DRAIN_TIMEOUT_S": "45"}) == 45


def test_options_are_read_as_they_were_written() -> None:
    options = some_options(etcd_endpoints=("a:1", "b:2"))
    assert plan.decode_options(plan.encode_options(options)) == options


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("..", "model"),
        ("Ünïcode", "n-code"),
        ("a" * 99, "a" * 64),
    ],
)
def test_a_directory_names_its_model(directory: str, name: str) -> None:
    assert plan.model_name(directory) == name


@pytest.mark.parametrize(
    ("offset_ms", "duration_ms", "expected"),
    [
        (0, 100, (0, 10)),
        (50, 25, (5, 3)),
        (0, 0, (0, 1)),
        (100, 0, (9, 1)),
        (99, 50, (9, 1)),
    ],
)
def test_a_bar_is_never_empty_and_never_off_its_axis(
    offset_ms: float, duration_ms: float, expected: tuple[int, int]
) -> None:
    assert bar(offset_ms, duration_ms, 100, width=10) == expected


def test_a_trace_without_any_time_still_has_bars() -> None:
    assert bar(0, 0, 0, width=10) == (0, 10)
