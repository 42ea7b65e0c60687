"""The pools an autoscaler puts when it starts."""

from __future__ import annotations

import json

from forebay.autoscaler.v1 import autoscaler_service_pb2 as autoscaler
from forebay_common.config import ConfigError
from google.protobuf import json_format

from forebay_autoscaler.config import PREFIX
from forebay_autoscaler.core.pools import check_pool
from forebay_autoscaler.core.refusal import RefusedError

VARIABLE = f"{PREFIX}_BOOTSTRAP"


def parse(text: str) -> tuple[autoscaler.Pool, ...]:
    """Read the option. ConfigError when it is no JSON list of pools."""
    if not text:
        return ()
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, f"is not JSON: {error}") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(VARIABLE, "must be a JSON list of objects")
    pools = []
    for index, item in enumerate(items):
        try:
            pools.append(check_pool(json_format.ParseDict(item, autoscaler.Pool())))
        except json_format.ParseError as error:
            raise ConfigError(VARIABLE, f"entry {index}: {error}") from None
        except RefusedError as refused:
            raise ConfigError(VARIABLE, f"entry {index}: {refused.message}") from None
    return tuple(pools)
