"""The small rules of the host: artifacts, names, memory, pauses, canaries, the link."""

import math

import msgspec
import pytest
from forebay_engine.core import link
from forebay_engine.core.artifact import find_problem
from forebay_engine.core.backoff import restart_delay_s
from forebay_engine.core.budget import check_fit
from forebay_engine.core.canary import Canary, agrees, is_answer
from forebay_engine.core.identity import check_model_version
from forebay_engine.core.refusal import Refused

PLAIN = ["config.json", "model.safetensors", "tokenizer.json"]
MIB = 1 << 20


def test_plain_safetensors_artifact_is_accepted() -> None:
    assert find_problem(PLAIN, {"model_type": "llama"}) is None


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "sub/weights.PT", "x.ckpt", "data.pkl", "modeling_x.py", "a.so"]
)
def test_artifact_that_can_run_code_is_refused_by_name(name: str) -> None:
    problem = find_problem([*PLAIN, name], {})
    assert problem is not None
    assert name in problem


def test_artifact_whose_configuration_points_to_code_is_refused() -> None:
    problem = find_problem(PLAIN, {"auto_map": {"AutoModel": "modeling_x.X"}})
    assert problem is not None
    assert "auto_map" in problem


@pytest.mark.parametrize(
    ("names", "config"),
    [(["model.safetensors"], {}), (PLAIN, None), (["config.json", "tokenizer.json"], {})],
)
def test_incomplete_artifact_is_refused(names: list[str], config: dict[str, object] | None) -> None:
    assert find_problem(names, config) is not None


@pytest.mark.parametrize("name", ["smollm2@1", "a@b", "llama-3.1_8b@2026.11"])
def test_harmless_model_versions_are_names(name: str) -> None:
    check_model_version(name)


@pytest.mark.parametrize(
    "name", ["", "a", "a@", "@b", "A@1", "a/b@1", "a@1@2", "x" * 65 + "@1", "a@1\n"]
)
def test_other_model_versions_are_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        check_model_version(name)
    assert refused.value.reason == "INVALID_ARGUMENT"


def test_version_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(Refused) as refused:
        check_fit(600 * MIB, budget_bytes=1000 * MIB, taken_bytes={"a@1": 500 * MIB})
    assert refused.value.reason == "INSUFFICIENT_MEMORY"
    assert all(figure in refused.value.message for figure in ("600 MiB", "1000 MiB", "500 MiB"))


@pytest.mark.parametrize(("wanted", "budget"), [(500, 1000), (0, 1000), (5000, 0)])
def test_version_that_fits_or_declares_nothing_is_taken(wanted: int, budget: int) -> None:
    check_fit(wanted * MIB, budget_bytes=budget * MIB, taken_bytes={"a@1": 500 * MIB})


def test_pauses_double_up_to_their_cap() -> None:
    pauses = [restart_delay_s(failures, first_s=0.5, most_s=3) for failures in (1, 2, 3, 4, 1000)]
    assert pauses == [0.5, 1, 2, 3, 3]


def test_tokens_must_be_the_recorded_ones() -> None:
    assert agrees(Canary(tokens=(1, 2)), Canary(tokens=(1, 2)))
    assert not agrees(Canary(tokens=(1, 2)), Canary(tokens=(1, 3)))
    assert not agrees(Canary(tokens=(1, 2)), Canary(vector=(1.0,)))


def test_vector_may_differ_by_rounding_alone() -> None:
    recorded = Canary(vector=(0.6, 0.8))
    assert agrees(recorded, Canary(vector=(0.6001, 0.7999)))
    assert not agrees(recorded, Canary(vector=(0.8, 0.6)))
    assert not agrees(recorded, Canary(vector=(0.6, 0.8, 0.0)))
    assert not agrees(recorded, Canary(vector=(0.0, 0.0)))


def test_nothing_and_nan_are_no_answers() -> None:
    assert not is_answer(Canary())
    assert not is_answer(Canary(vector=(1.0, math.nan)))
    assert is_answer(Canary(tokens=(5,)))


@pytest.mark.parametrize(
    "message",
    [
        link.Phase(3),
        link.Load(running=2, generated_tokens=7),
        link.Failed("why"),
        link.Done("drain"),
        link.Refused("sleep", "UNSUPPORTED", "no"),
    ],
)
def test_runner_messages_survive_the_link(message: link.FromRunner) -> None:
    line = link.encode(message)
    assert line.count(b"\n") == 1
    assert link.decode_from_runner(line) == message


def test_host_messages_survive_the_link() -> None:
    for message in (link.Start("{}", "/x.sock"), link.Command("drain")):
        assert link.decode_from_host(link.encode(message)) == message


def test_unknown_messages_are_errors() -> None:
    with pytest.raises(msgspec.DecodeError):
        link.decode_from_runner(b'{"type":"start","spec_json":"","socket_path":""}\n')
