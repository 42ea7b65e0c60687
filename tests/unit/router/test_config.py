"""What a router refuses to start with."""

from __future__ import annotations

from typing import Any

import pytest
from forebay_common.config import ConfigError
from forebay_router.config import Config


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({}, "KEY_SECRET_FILE"),
        ({"open": True, "grpc_listen": "0.0.0.0:7070"}, "GRPC_LISTEN"),
        ({"open": True, "http_listen": "10.0.0.1:8080"}, "HTTP_LISTEN"),
        ({"key_secret_file": "f", "grpc_listen": "0.0.0.0:7070"}, "ADVERTISE_HOST"),
        ({"key_secret_file": "f", "grpc_listen": "[::]:7070"}, "ADVERTISE_HOST"),
        ({"open": True, "cors_origins": "chat.example.com"}, "CORS_ORIGINS"),
        ({"open": True, "pool_classes": "batch=SLOW"}, "POOL_CLASSES"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_names_its_variable(
    options: dict[str, Any], variable: str
) -> None:
    with pytest.raises(ConfigError, match=f"FOREBAY_ROUTER_{variable}"):
        Config(**options)


def test_what_can_be_meant_is_taken() -> None:
    Config(open=True)
    Config(key_secret_file="f", grpc_listen="0.0.0.0:7070", advertise_host="10.0.0.1")
    assert Config(open=True, cors_origins="*").cors() is not None
    assert Config(open=True).cors() is None
