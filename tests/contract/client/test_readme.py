"""The options of a local fleet that the README lists are those that the code reads."""

from pathlib import Path

from forebay_client.fleet.config import PREFIX, Config
from forebay_common.config import describe

ROOT = Path(__file__).resolve().parents[3]


def test_the_readme_holds_the_table_of_options() -> None:
    assert describe(Config, PREFIX) in (ROOT / "libs" / "client" / "README.md").read_text()
