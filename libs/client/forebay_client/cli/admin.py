"""Calls that change who may ask: by an admin's key, or by the file of secrets itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc
from forebay.router.v1 import key_service_pb2_grpc as key_rpc
from forebay_common.apikeys import read_secrets
from forebay_common.metadata import Metadata

from forebay_client.cli.where import address_option, key_option, router_of, state_dir_option
from forebay_client.errors import from_call
from forebay_client.fleet.directory import Directory
from forebay_client.requests import key_metadata

TIMEOUT_S = 10.0
_F = TypeVar("_F", bound=Callable[..., Any])


class Admin:
    """A router, and by what right it is called."""

    def __init__(self, directory: Directory, address: str | None, metadata: Metadata) -> None:
        self._address = router_of(directory, address)
        self.metadata = metadata

    @contextmanager
    def calls(self) -> Iterator[Any]:
        """A stub of KeyService.

        Raises:
            ForebayError: see `forebay_client.errors`.
        """
        with grpc.insecure_channel(self._address) as channel:
            try:
                yield key_rpc.KeyServiceStub(channel)
            except grpc.RpcError as error:
                raise from_call(error, self._address) from None


def admin_options(command: _F) -> _F:
    """Add what names a router and gives the right to change keys; the command gets `admin`."""

    def called(
        *,
        directory: Directory,
        address: str | None,
        api_key: str | None,
        secret_file: Path | None,
        **rest: Any,
    ) -> Any:
        return command(admin=Admin(directory, address, _right(api_key, secret_file)), **rest)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    # Options that the command has already stay above those that all of them share.
    called.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (state_dir_option, address_option, key_option, _secret_file_option):
        option(called)
    return called  # type: ignore[return-value]


def _secret_file_option(command: _F) -> _F:
    return click.option(
        "--secret-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="FOREBAY_KEY_SECRET_FILE",
        show_envvar=True,
        help="The routers' file of secrets: whoever holds it needs no key to make keys.",
    )(command)


def _right(api_key: str | None, secret_file: Path | None) -> Metadata:
    if api_key is not None or secret_file is None:
        return key_metadata(api_key)
    try:
        secrets = read_secrets(secret_file.read_text())
    except ValueError as error:
        raise click.ClickException(f"{secret_file}: {error}") from None
    return key_metadata(secrets.operator_token())
