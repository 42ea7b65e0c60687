"""`forebay chat`."""

from __future__ import annotations

import contextlib
import sys
import time

import click
from forebay_common.errors import ForebayError

from forebay_client.answers import Answer, Model
from forebay_client.cli.trace import show_trace
from forebay_client.cli.where import address_option, key_option, router_of, state_dir_option
from forebay_client.fleet.directory import Directory
from forebay_client.fleet.launch import FleetError
from forebay_client.requests import GenerateOptions, Message
from forebay_client.sync import Client

_TURNS_MAX = 64
"""Older ones are forgotten, in pairs."""


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--model", metavar="NAME", help="Model, alias or name@version.  [default: the first that chats]"
)
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Most tokens of an answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="How freely tokens are drawn; 0: always the likeliest one.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    default=300.0,
    show_default=True,
    help="Longest time that a whole answer may take.",
)
@click.option("--trace", "traced", is_flag=True, help="Show where the time of each answer went.")
@key_option
@address_option
@state_dir_option
def chat(
    *,
    directory: Directory,
    address: str | None,
    api_key: str | None,
    prompt: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    timeout_s: float,
    traced: bool,
) -> None:
    """Ask a model, and show its answer as it comes.

    Without PROMPT, or with -, the question is standard input; on a terminal, a conversation begins.
    """
    options = GenerateOptions(timeout_s=timeout_s)
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    with Client(router_of(directory, address), api_key=api_key) as client:
        talk = _Talk(client, model or _first_chat_model(client.models()), options, system)
        if prompt is None and sys.stdin.isatty():
            _converse(talk, directory if traced else None)
            return
        answer = talk.ask(sys.stdin.read() if prompt in (None, "-") else str(prompt))
    if traced:
        show_trace(directory, answer.request_id)


class _Talk:
    """A conversation with one model; what was said so far goes with each question."""

    def __init__(
        self, client: Client, model: str, options: GenerateOptions, system: str | None
    ) -> None:
        self.model = model
        self._client = client
        self._options = options
        self._opening = [Message("system", system)] if system else []
        self._turns: list[Message] = []

    def ask(self, question: str) -> Answer:
        """Stream the answer to standard output, then say on standard error what it took."""
        turns = [*self._opening, *self._turns, Message("user", question)]
        began_s = time.monotonic()
        first_s: float | None = None
        with self._client.stream_chat(self.model, turns, **self._options) as stream:
            try:
                for delta in stream:
                    if first_s is None:
                        first_s = time.monotonic() - began_s
                    click.echo(delta.text, nl=False)
            finally:
                if first_s is not None:
                    click.echo()
        answer = stream.answer
        _report(answer, first_s or 0.0, time.monotonic() - began_s)
        self._turns += [Message("user", question), Message("assistant", answer.text)]
        del self._turns[:-_TURNS_MAX]
        return answer

    def forget(self) -> None:
        """Begin a new conversation."""
        self._turns.clear()


def _converse(talk: _Talk, traced_in: Directory | None) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing
    click.echo(f"{talk.model}: /new starts over, Ctrl-D ends, Ctrl-C stops an answer", err=True)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if question == "/new":
            talk.forget()
        elif question:
            try:
                answer = talk.ask(question)
                if traced_in is not None:
                    show_trace(traced_in, answer.request_id)
            except KeyboardInterrupt:
                click.echo("(stopped)", err=True)
            except (ForebayError, FleetError) as error:
                click.echo(f"Error: {error}", err=True)


def _first_chat_model(models: tuple[Model, ...]) -> str:
    for model in models:
        if any(version.task == "generate" and version.share > 0 for version in model.versions):
            return model.name
    raise FleetError("no model that chats is registered; name one with --model")


def _report(answer: Answer, first_s: float, total_s: float) -> None:
    tokens = answer.usage.completion_tokens
    decode_s = total_s - first_s
    rate = f", {(tokens - 1) / decode_s:.0f}/s" if tokens > 1 and decode_s > 0 else ""
    parts = [
        answer.model_version + (f" on {answer.replica}" if answer.replica else ""),
        f"{tokens} tokens ({answer.finish_reason}){rate}",
        f"first after {first_s * 1000:.0f} ms, all after {total_s * 1000:.0f} ms",
        answer.request_id,
    ]
    if answer.system_fingerprint.startswith("simulated"):
        parts.insert(0, "simulated")
    click.secho(" · ".join(parts), err=True, dim=True)
