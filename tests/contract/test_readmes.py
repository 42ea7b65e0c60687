"""The configuration that a README lists is the configuration that the code reads."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forebay_common.config import COMMON_PREFIX, CommonConfig, describe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("service", ["router", "batcher", "engine", "registry", "autoscaler"])
def test_a_services_readme_holds_its_config_table(service: str) -> None:
    config = importlib.import_module(f"forebay_{service}.config")
    readme = (ROOT / "services" / service / "README.md").read_text()
    assert describe(config.Config, config.PREFIX) in readme


def test_commons_readme_holds_its_config_table() -> None:
    readme = (ROOT / "libs" / "common" / "README.md").read_text()
    assert describe(CommonConfig, COMMON_PREFIX) in readme


@pytest.mark.parametrize(
    ("service", "variable", "value"),
    [
        ("router", "FOREBAY_ROUTER_MAX_ATTEMPTS", "many"),
        ("batcher", "FOREBAY_BATCHER_ROLE", "idle"),
        ("engine", "FOREBAY_ENGINE_LOAD", "[{"),
        ("engine", "FOREBAY_ENGINE_MODELS_MAX", "0"),
        ("registry", "FOREBAY_REGISTRY_BOOTSTRAP", "x"),
        ("registry", "FOREBAY_LEASE_TTL_S", "0"),
        ("autoscaler", "FOREBAY_AUTOSCALER_BOOTSTRAP", "x"),
    ],
)
def test_a_wrong_variable_ends_a_service_with_one_line(
    service: str, variable: str, value: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"forebay_{service}"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{variable}: ")
