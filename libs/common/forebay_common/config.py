"""Configuration from the environment: one frozen dataclass per service, checked when loaded.

Every field is declared with `option`, so that its meaning, unit and bounds stand beside it. A wrong
value fails at start, with the name of the variable. `python -m forebay_common.config MODULE` prints
the table that stands in a service's README.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import secrets
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ConfigError(ValueError):
    """A variable of the environment has a value that cannot be used."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable = variable


@contextlib.contextmanager
def said_plainly() -> Iterator[None]:
    """End the process with a wrong variable's one line instead of a traceback."""
    try:
        yield
    except ConfigError as error:
        sys.exit(str(error))


def option(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a field: its default, one sentence with unit and when to change it, its bounds."""
    return dataclasses.field(
        default=default,
        metadata={"doc": doc, "minimum": minimum, "maximum": maximum, "choices": choices},
    )


def load(cls: type[_T], prefix: str, environ: Mapping[str, str]) -> _T:
    """Build `cls` from `{prefix}_{FIELD}` variables.

    Raises:
        ConfigError: a value does not parse, is out of bounds, or is not one of the choices.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass
        variable = f"{prefix}_{field.name.upper()}"
        raw = environ.get(variable)
        if raw is None:
            continue
        value = _parse(hints[field.name], raw.strip(), variable)
        _check(value, field.metadata, variable)
        values[field.name] = value
    return cls(**values)


def _parse(kind: Any, raw: str, variable: str) -> Any:
    if kind is str:
        return raw
    if kind is bool:
        lowered = raw.lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise ConfigError(variable, f"must be true or false, not {raw!r}")
    if kind in (int, float):
        try:
            number = kind(raw)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(variable, f"must be {wanted}, not {raw!r}") from None
        if not math.isfinite(number):
            raise ConfigError(variable, f"must be finite, not {raw!r}")
        return number
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    raise TypeError(f"{variable}: fields of type {kind} are not supported")


def _check(value: Any, bounds: Mapping[str, Any], variable: str) -> None:
    minimum, maximum, choices = bounds["minimum"], bounds["maximum"], bounds["choices"]
    if minimum is not None and value < minimum:
        raise ConfigError(variable, f"must be at least {minimum}, not {value}")
    if maximum is not None and value > maximum:
        raise ConfigError(variable, f"must be at most {maximum}, not {value}")
    if choices and value not in choices:
        raise ConfigError(variable, f"must be one of {', '.join(choices)}, not {value!r}")


def describe(cls: type[Any], prefix: str) -> str:
    """Render the options as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(default)
        shown = f"`{default}`" if default != "" else "(empty)"
        bounds = [
            f"{word} {field.metadata[key]:g}"
            for word, key in (("min", "minimum"), ("max", "maximum"))
            if field.metadata[key] is not None
        ]
        if field.metadata["choices"]:
            bounds.append("one of " + ", ".join(field.metadata["choices"]))
        doc = field.metadata["doc"] + (f" ({'; '.join(bounds)})" if bounds else "")
        rows.append(f"| `{prefix}_{field.name.upper()}` | {shown} | {doc} |")
    return "\n".join(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class CommonConfig:
    """What every service is told."""

    etcd_endpoints: tuple[str, ...] = option(
        ("127.0.0.1:2379",), "etcd members, `host:port`, comma separated."
    )
    namespace: str = option(
        "/forebay", "Prefix of every key in etcd; one per fleet that shares an etcd."
    )
    lease_ttl_s: float = option(
        3.0,
        "How long a dead process stays listed, in seconds; raise it where pauses are long.",
        minimum=2,
        maximum=60,
    )
    drain_timeout_s: float = option(
        30.0,
        "How long requests in flight may go on after SIGTERM, in seconds.",
        minimum=0,
        maximum=3600,
    )
    log_level: str = option(
        "INFO", "Least severe log record that is written.", choices=("DEBUG", "INFO", "WARNING")
    )
    instance_id: str = option("", "Name of this process in the fleet; random when empty.")


COMMON_PREFIX = "FOREBAY"


def load_common(environ: Mapping[str, str]) -> CommonConfig:
    """Load `CommonConfig`, giving the process a random instance id where none is set."""
    config = load(CommonConfig, COMMON_PREFIX, environ)
    if config.instance_id:
        return config
    return dataclasses.replace(config, instance_id=secrets.token_hex(4))


def main(argv: list[str]) -> int:
    """Print the option table of the `Config` in each named module."""
    for name in argv:
        module = importlib.import_module(name)
        if name == __spec__.name:
            print(describe(CommonConfig, COMMON_PREFIX))
        else:
            print(describe(module.Config, module.PREFIX))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
