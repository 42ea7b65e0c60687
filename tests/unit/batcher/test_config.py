"""What a batcher refuses to start with."""

from __future__ import annotations

import pytest
from forebay_batcher.config import PREFIX, Config
from forebay_batcher.core.queue import PriorityClass
from forebay_common.config import ConfigError, load


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POOL", ""),
        ("POOL", "a/b"),
        ("REPLICA_ID", "a/b"),
        ("ROLE", "leader"),
        ("ENGINE_ADDRESS", ""),
        ("QUEUED_MAX_BATCH", "-1"),
        ("KV_CACHE_USAGE_MAX", "1.5"),
    ],
)
def test_a_wrong_value_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, PREFIX, {f"{PREFIX}_{variable}": value})
    assert caught.value.variable == f"{PREFIX}_{variable}"


def test_a_wildcard_address_needs_a_host_to_advertise() -> None:
    listen = {f"{PREFIX}_LISTEN": "0.0.0.0:7000"}
    with pytest.raises(ConfigError) as caught:
        load(Config, PREFIX, listen)
    assert caught.value.variable == f"{PREFIX}_ADVERTISE_HOST"
    assert load(Config, PREFIX, {**listen, f"{PREFIX}_ADVERTISE_HOST": "10.0.0.1"})


def test_every_class_has_limits() -> None:
    assert set(Config().limits().classes) == set(PriorityClass)
