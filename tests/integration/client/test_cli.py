"""What the command says when something is not as it should be: one line, and not 0."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from forebay_client.cli import forebay
from forebay_client.fleet import etcd
from forebay_client.fleet.core.etcd_version import Version
from forebay_client.traces.core.span import Span, Value
from forebay_client.traces.store import SpanWriter

from tests.fleet_commands import Commands

pytestmark = pytest.mark.integration
Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("FOREBAY_ADDRESS", raising=False)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(forebay, arguments)

    return call


def one_line(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: ")
    (line,) = result.output.splitlines()
    return line


def test_without_a_fleet_each_command_says_so(call: Call) -> None:
    assert "forebay up" in one_line(call("chat", "hi"))
    assert "forebay up" in one_line(call("models"))
    assert call("status").exit_code == 1
    assert json.loads(call("status", "--json").output) == {"phase": "stopped"}
    assert call("down").output == "no fleet is running\n"
    assert "no traces" in one_line(call("trace"))


def test_a_taken_port_names_its_option(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(
            call("up", "--model", "simulated", "--grpc-port", "0", "--http-port", str(port))
        )
    assert str(port) in line
    assert "--http-port" in line


def test_impossible_wishes_are_refused_before_anything_starts(call: Call, tmp_path: Path) -> None:
    assert "--model" in one_line(call("up", "--model", str(tmp_path)))
    few = call("up", "--model", "simulated", "--replicas", "3", "--max", "2")
    assert "--max 2" in one_line(few)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--replicas", "many"), "--replicas"),
        (("up", "--modle", "x"), "--model"),
        (("chatt",), "chatt"),
        (("chat", "--timeout"), "--timeout"),
    ],
)
def test_a_mistyped_command_is_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    output = Commands(tmp_path).run(*arguments, status=2)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    assert said in output
    assert "--help`" in output


def test_a_directory_that_cannot_be_made_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "state")
    line = one_line(
        call(
            "up",
            "--model",
            "simulated",
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--state-dir",
            inside,
        )
    )
    assert inside in line


def test_spans_that_cannot_be_read_are_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "spans.db").write_text("no database at all" * 100)
    assert "span store" in one_line(call("trace"))


def test_a_wrong_variable_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_FLEET_START_TIMEOUT_S", "soon")
    line = one_line(call("up", "--model", "simulated"))
    assert line.startswith("Error: FOREBAY_FLEET_START_TIMEOUT_S: ")


def test_nobody_at_the_address_is_one_line(call: Call) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert address in one_line(call("chat", "hi", "--model", "m", "--address", address))
        assert call("status", "--address", address).exit_code == 1


def test_a_trace_that_is_kept_can_be_read_without_a_fleet(call: Call, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    writer = SpanWriter(tmp_path / "state" / "spans.db")
    attributes: dict[str, Value] = {"forebay.request_id": "r-1", "gen_ai.usage.output_tokens": 7}
    span = Span("a" * 32, "b" * 16, "", "router", "forebay-router", "i", 1, 5_000_001)
    failed = Span(
        "a" * 32, "c" * 16, "b" * 16, "queue", "forebay-batcher", "i", 2, 9, True, "QUEUE_FULL"
    )
    named = Span(
        "a" * 32, "d" * 16, "b" * 16, "generate", "forebay-runner", "i", 3, 9, attributes=attributes
    )
    writer.add([span, failed, named], now_unix_s=1.0)
    writer.close()
    shown = call("trace", "a" * 32).output
    assert "└ generate runner" in shown
    assert "QUEUE_FULL" in shown
    found = json.loads(call("trace", "r-1", "--json").output)
    assert [one["name"] for one in found["spans"]] == ["generate"]
    assert json.loads(call("trace", "--json").output)[0]["request_id"] == "r-1"


@pytest.mark.parametrize(
    ("versions", "path", "warns"),
    [
        ({"a": (3, 4, 23), "b": (3, 5, 1)}, "a", False),
        ({"a": (3, 5, 1), "b": (3, 5, 17)}, "b", False),
        ({"a": (3, 4, 16), "b": (3, 5, 1)}, "a", True),
        ({"a": (3, 3, 0), "b": (3, 5, 1)}, "b", True),
        ({"a": None, "b": (3, 5, 1)}, "b", True),
    ],
)
def test_the_best_etcd_is_taken(
    versions: dict[str, Version | None],
    path: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = [(name, "somewhere") for name in versions]
    monkeypatch.setattr(etcd, "_candidates", lambda: iter(candidates))
    monkeypatch.setattr(etcd, "_version_of", lambda name: versions[name])
    found = etcd.find()
    assert (found.path, bool(found.warning)) == (path, warns)


def test_no_etcd_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "_candidates", lambda: iter(()))
    with pytest.raises(etcd.EtcdNotFoundError, match="apt-get install"):
        etcd.find()
