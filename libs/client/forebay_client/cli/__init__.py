"""The command `forebay`. Errors are one line on standard error, and the exit status is not 0."""

from __future__ import annotations

import os
import sqlite3
import sys
from typing import Any

import click
from forebay_common.config import ConfigError
from forebay_common.errors import ForebayError

from forebay_client.cli.chat import chat
from forebay_client.cli.fleet import down, up
from forebay_client.cli.keys import keys
from forebay_client.cli.models import models
from forebay_client.cli.status import status
from forebay_client.cli.tenants import tenants
from forebay_client.cli.trace import trace
from forebay_client.cli.why import why
from forebay_client.fleet.launch import FleetError

_INTERRUPTED = 130


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ForebayError as error:
            raise click.ClickException(_one_line(error)) from None
        except (FleetError, ConfigError) as error:
            raise click.ClickException(str(error)) from None
        except sqlite3.Error as error:
            raise click.ClickException(f"the span store cannot be read: {error}") from None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="forebay-client", prog_name="forebay")
def forebay() -> None:
    """Serve language models: start a fleet on this machine, ask it, see what it does."""


for _command in (up, down, status, chat, models, trace, why, keys, tenants):
    forebay.add_command(_command)


def _one_line(error: ForebayError) -> str:
    text = " ".join(error.message.split())
    if error.retry_after_s is not None:
        text += f" Try again in {error.retry_after_s:g} s."
    return f"{text} [{error.reason.value}]"


def main() -> None:
    """Entry point of `forebay`."""
    try:
        forebay.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(_INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        # Click's own way takes three lines.
        called = error.ctx.command_path if error.ctx else "forebay"
        click.echo(f"Error: {error.format_message()} See `{called} --help`.", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
