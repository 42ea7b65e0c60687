"""The versions a registry puts into the catalogue when it starts."""

from __future__ import annotations

import json

from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.config import ConfigError
from google.protobuf import json_format

from forebay_registry.config import PREFIX

VARIABLE = f"{PREFIX}_BOOTSTRAP"


def parse(text: str) -> tuple[registry.PutVersionRequest, ...]:
    """Read the option. ConfigError when it is no JSON list of PutVersionRequest."""
    if not text:
        return ()
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, f"is not JSON: {error}") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(VARIABLE, "must be a JSON list of objects")
    requests = []
    for index, item in enumerate(items):
        try:
            requests.append(json_format.ParseDict(item, registry.PutVersionRequest()))
        except json_format.ParseError as error:
            raise ConfigError(VARIABLE, f"entry {index}: {error}") from None
    return tuple(requests)
