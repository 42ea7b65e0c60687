"""Keys and tenants from the command line, and that all routers follow them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result
from forebay_client import AsyncClient, NotAllowed
from forebay_client.cli import forebay
from forebay_common.apikeys import read_secrets

from tests.integration.router.conftest import (
    RunningRouter,
    StartRouter,
    StartStandIn,
    eventually,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("catalogue")]

FOLLOWS_S = 5.0

Run = Callable[..., Any]


@pytest.fixture
async def routers(
    secret_file: Path, start_router: StartRouter, start_stand_in: StartStandIn
) -> list[RunningRouter]:
    await start_stand_in()
    return [await start_router(key_secret_file=str(secret_file)) for _ in range(3)]


@pytest.fixture
def run(routers: list[RunningRouter], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, against the first router."""
    monkeypatch.setenv("FOREBAY_ADDRESS", routers[0].instance.addresses["grpc"])
    monkeypatch.delenv("FOREBAY_API_KEY", raising=False)

    async def run(*arguments: str, **environment: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke, forebay, arguments, env=environment or None
        )

    return run


async def test_the_command_makes_rotates_and_revokes_keys_that_all_routers_follow(
    routers: list[RunningRouter], run: Run, secret_file: Path
) -> None:
    operator = ("--secret-file", str(secret_file))
    assert (await run("tenants", "set", "acme")).exit_code != 0
    made = await run(
        "tenants", "set", "acme", "--model", "ch*", "--concurrent", "4",
        "--limit-model", "chat", "requests_per_min=600,request_burst=50", *operator,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    admin = (await run("keys", "create", "acme", "--scope", "admin", *operator)).stdout.strip()
    by_key = ("--key", admin)
    created = await run("keys", "create", "acme", "--note", "tests", "--json", *by_key)
    key = json.loads(created.stdout)
    assert key["scopes"] == ["inference"]
    await _followed(routers, key["text"], is_good=True)

    listed = await run("keys", "list", "--json", *by_key)
    by_id = {each["key_id"]: each for each in json.loads(listed.stdout)}
    assert by_id[key["key_id"]]["note"] == "tests"
    assert key["text"].partition(".")[2] not in listed.stdout
    tenants = json.loads((await run("tenants", "list", "--json", *by_key)).stdout)
    assert tenants[0]["models"] == ["ch*"]
    assert tenants[0]["model_limits"]["chat"]["requests_per_min"] == "600"
    assert "chat: 600 requests_per_min" in (await run("tenants", "list", *by_key)).stdout

    rotated = await run("keys", "rotate", key["key_id"], "--overlap", "1h", *by_key)
    successor = rotated.stdout.splitlines()[0]
    await _followed(routers, successor, is_good=True)
    await _followed(routers, key["text"], is_good=True)
    assert (await run("keys", "revoke", key["key_id"], *by_key)).exit_code == 0
    await _followed(routers, key["text"], is_good=False)
    await _followed(routers, successor, is_good=True)

    chatted = await run("models", "--json", FOREBAY_API_KEY=admin)
    assert [model["name"] for model in json.loads(chatted.stdout)] == ["chat"]
    refused = await run("models", FOREBAY_API_KEY=key["text"])
    assert refused.exit_code == 1
    assert "The API key is not valid. [UNAUTHENTICATED]" in refused.output
    assert (await run("tenants", "delete", "acme", "--yes", *operator)).exit_code == 0
    await _followed(routers, successor, is_good=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("keys", "create", "nobody"), "The tenant does not exist."),
        (("keys", "revoke", "aaaaaaaaaaaaa"), "No key has this id."),
        (("keys", "create", "acme", "--lifetime", "soon"), "such as 30d"),
        (("tenants", "set", "Not A Name"), "must be 1 to 64"),
        (("tenants", "set", "acme", "--limit-model", "chat", "speed=3"), "requests_per_min"),
        (("tenants", "set", "acme", "--token-burst", "5"), "tokens_per_min"),
    ],
)
async def test_the_command_says_in_one_line_what_is_wrong(
    run: Run, secret_file: Path, arguments: tuple[str, ...], says: str
) -> None:
    refused = await run(*arguments, "--secret-file", str(secret_file))
    assert refused.exit_code != 0
    assert says in refused.output


async def test_the_holder_of_the_file_may_ask_no_model(
    routers: list[RunningRouter], secret_file: Path
) -> None:
    token = read_secrets(secret_file.read_text()).operator_token()
    async with AsyncClient(routers[0].instance.addresses["grpc"], api_key=token) as client:
        await client.models()
        with pytest.raises(NotAllowed):
            await client.generate("chat", "Hello?")


async def _followed(routers: list[RunningRouter], key: str, *, is_good: bool) -> None:
    """All routers come to let a key in, or no longer."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:

        async def is_let_in(router: RunningRouter) -> bool:
            async with http.get(f"{router.url}/v1/models") as answer:
                assert answer.status in (200, 401)
                return answer.status == 200

        async def holds() -> bool:
            return all([await is_let_in(router) is is_good for router in routers])

        assert await eventually(holds, within_s=FOLLOWS_S) <= FOLLOWS_S
