"""The table of HTTP/2's rules names tests that exist."""

import re
from pathlib import Path

from forebay_wire.core.limits import Limits

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "libs" / "wire" / "CONFORMANCE.md").read_text()


def _tests(pattern: str) -> dict[str, set[str]]:
    return {
        path.name: set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
        for path in (ROOT / "tests").rglob(pattern)
    }


def test_each_test_the_table_names_exists() -> None:
    known = set().union(*_tests("test_*.py").values())
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert named
    assert not named - known


def test_each_rule_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "| test |" not in line]
    assert rows
    assert not [row for row in rows if "`test_" not in row]


def test_the_limits_the_table_names_are_those_of_the_code() -> None:
    named = set(re.findall(r"`Limits\.(\w+)`", TABLE))
    assert named <= set(Limits.__dataclass_fields__)
