"""What is told about a fleet that starts, and how phases are measured."""

import dataclasses

from forebay_client.fleet.core.loads import Loads, Seen, lost_launches
from forebay_client.fleet.core.log_tail import first_crash, reason_in
from forebay_client.fleet.core.progress import news
from forebay_client.fleet.core.state import (
    Fleet,
    Phase,
    PhaseTime,
    Process,
    Service,
    ServiceState,
    decode,
    encode,
)

_READY = Service(
    "router",
    ServiceState.READY,
    10.0,
    address="127.0.0.1:1",
    started_in_s=1.25,
    process=Process(7, "9"),
)


def a_fleet(**changes: object) -> Fleet:
    fleet = Fleet(phase=Phase.STARTING, supervisor=Process(1, "2"), started_unix_s=3.0)
    return dataclasses.replace(fleet, **changes)  # type: ignore[arg-type]


def test_phases_last_until_the_next_is_seen() -> None:
    loads = Loads()
    assert loads.observe("r-1", [Seen("m@1", "loading", "import")], now=1.0)
    assert not loads.observe("r-1", [Seen("m@1", "loading", "import")], now=2.0)
    assert loads.observe("r-1", [Seen("m@1", "loading", "weights")], now=9.0)
    assert loads.observe("r-1", [Seen("m@1", "active", "")], now=10.5)
    (load,) = loads.all()
    assert load.phases == (PhaseTime("import", 8.0), PhaseTime("weights", 1.5))
    assert (load.state, load.phase) == ("active", "")


def test_a_load_that_begins_again_forgets_the_former_one() -> None:
    loads = Loads()
    loads.observe("r-1", [Seen("m@1", "loading", "import")], now=1.0)
    loads.observe("r-1", [Seen("m@1", "failed", "")], now=2.0)
    loads.observe("r-1", [Seen("m@1", "loading", "process")], now=3.0)
    loads.observe("r-1", [Seen("m@1", "loading", "import")], now=4.0)
    assert loads.all()[0].phases == (PhaseTime("process", 1.0),)
    assert loads.failures == {"m@1": ["r-1"]}


def test_failures_count_over_replicas_and_replicas_can_be_forgotten() -> None:
    loads = Loads()
    for number in range(3):
        loads.observe(f"r-{number}", [Seen("m@1", "failed", "")], now=1.0)
    assert loads.failures == {"m@1": ["r-0", "r-1", "r-2"]}
    assert loads.forget(["r-0", "r-1"])
    assert not loads.forget(["r-0"])
    assert [load.replica_id for load in loads.all()] == ["r-2"]


def test_only_what_is_new_is_told() -> None:
    before = a_fleet(services=(Service("router", ServiceState.STARTING, 9.0),))
    ready = a_fleet(services=(_READY,), warnings=("old etcd",))
    assert list(news(before, ready)) == [
        "warning: old etcd",
        "router: ready after 1.2 s on 127.0.0.1:1",
    ]
    assert list(news(ready, ready)) == []


def test_a_death_is_told_with_its_reason_each_time() -> None:
    states = [
        a_fleet(
            services=(
                Service("router", ServiceState.RESTARTING, 1.0, restarts=n, detail="exited with 1"),
            )
        )
        for n in (1, 2)
    ]
    assert list(news(states[0], states[1])) == ["router: restarting (exited with 1)"]


def test_a_loads_phases_are_told_as_they_come() -> None:
    loads = Loads()
    last = a_fleet()
    told: list[str] = []
    for now, phase in ((1.0, "import"), (9.0, "weights"), (10.0, "")):
        loads.observe("r-1", [Seen("m@1", "loading" if phase else "active", phase)], now=now)
        fleet = a_fleet(loads=loads.all())
        told += news(last, fleet)
        last = fleet
    assert told == [
        "m@1 on r-1: import",
        "m@1 on r-1: weights (after import 8.0 s)",
        "m@1 on r-1: active (import 8.0 s, weights 1.0 s)",
    ]


def test_the_state_file_is_read_as_it_was_written() -> None:
    loads = Loads()
    loads.observe("r-1", [Seen("m@1", "loading", "import")], now=1.0)
    loads.observe("r-1", [Seen("m@1", "active", "")], now=2.0)
    waiting = Service("etcd", ServiceState.EXTERNAL, 1.0)
    fleet = a_fleet(services=(_READY, waiting), loads=loads.all(), warnings=("w",))
    assert decode(encode(fleet)) == fleet


def test_a_state_file_of_another_version_is_nobodys() -> None:
    assert decode(encode(a_fleet()).replace('"version": 1', '"version": 99')) is None
    for text in ("", "{", "[]", "{}", "null", '{"version": 1}'):
        assert decode(text) is None


def test_the_last_line_of_a_log_says_why() -> None:
    assert reason_in(["a", '{"level": "INFO", "message": "bound"}', ""]) == "bound"
    record = '{"message": "unexpected", "exception": "Traceback…\\nOSError: cannot listen"}'
    assert reason_in([record]) == "OSError: cannot listen"
    assert reason_in(["FOREBAY_X: must be a number\n", "\n"]) == "FOREBAY_X: must be a number"
    assert reason_in(["{not json"]) == "{not json"
    assert reason_in(["x" * 1000], chars_max=10) == "x" * 10
    assert reason_in([]) == ""


def test_what_python_says_of_its_own_end_explains_nothing() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "forebay_common.config.ConfigError: X: no such profile",
        "Exception ignored in: <function f>",
        "Traceback (most recent call last):",
        '  File "y.py", line 2, in __del__',
        "RuntimeError: Event loop is closed",
    ]
    assert reason_in(lines) == "ConfigError: X: no such profile"
    assert reason_in([*lines, "and another", "life"]) == "life"


def test_of_several_logs_the_one_that_ends_in_a_crash_tells() -> None:
    stopped = ['{"message": "SIGTERM: draining"}']
    assert first_crash([stopped, ["ImportError: no"]]) == "ImportError: no"
    assert first_crash([stopped, ['{"message": "x"}']]) == "SIGTERM: draining"
    assert first_crash([[], []]) == ""


def test_launches_that_left_nothing_are_told_from_those_that_live() -> None:
    effects = [
        ["launch r-3", "stop r-1 (late)"],
        [],
        ["activate r-2"],
        ["launch r-2", "launch r-1"],
    ]
    assert lost_launches(effects, alive=1) == ("r-2", "r-1")
    assert lost_launches(effects, alive=5) == ()
