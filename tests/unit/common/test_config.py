import dataclasses

import pytest
from forebay_common.config import ConfigError, describe, load, load_common, option


@dataclasses.dataclass(frozen=True, slots=True)
class _Config:
    listen: str = option("127.0.0.1:0", "Where to listen.")
    limit: int = option(10, "Most at once.", minimum=1, maximum=100)
    ratio: float = option(0.5, "Share.", minimum=0, maximum=1)
    on: bool = option(False, "Whether.")
    names: tuple[str, ...] = option(("a",), "Names.")
    mode: str = option("fast", "How.", choices=("fast", "safe"))


def test_defaults_hold_where_nothing_is_set() -> None:
    assert load(_Config, "X", {}) == _Config()


def test_every_kind_of_field_is_parsed() -> None:
    environ = {
        "X_LISTEN": " 0.0.0.0:1 ",
        "X_LIMIT": "7",
        "X_RATIO": "0.25",
        "X_ON": "yes",
        "X_NAMES": "b, c,,",
        "X_MODE": "safe",
    }
    assert load(_Config, "X", environ) == _Config("0.0.0.0:1", 7, 0.25, True, ("b", "c"), "safe")


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("X_LIMIT", "many", "whole number"),
        ("X_LIMIT", "0", "at least 1"),
        ("X_LIMIT", "101", "at most 100"),
        ("X_RATIO", "nan", "finite"),
        ("X_RATIO", "x", "a number"),
        ("X_ON", "perhaps", "true or false"),
        ("X_MODE", "slow", "one of fast, safe"),
    ],
)
def test_a_wrong_value_names_its_variable(variable: str, value: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        load(_Config, "X", {variable: value})
    assert caught.value.variable == variable
    assert str(caught.value).startswith(variable + ":")


def test_an_instance_without_a_name_gets_a_random_one() -> None:
    first, second = load_common({}), load_common({})
    assert first.instance_id != second.instance_id
    assert load_common({"FOREBAY_INSTANCE_ID": "a"}).instance_id == "a"


def test_the_table_shows_variable_default_and_bounds() -> None:
    assert "| `X_LIMIT` | `10` | Most at once. (min 1; max 100) |" in describe(_Config, "X")
