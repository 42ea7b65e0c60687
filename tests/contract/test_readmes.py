"""The configuration that a README lists is the configuration that the code reads."""

import importlib
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
