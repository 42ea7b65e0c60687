"""Sends planned requests to an OpenAI server at their times, and notes when first tokens come."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import time
from collections.abc import Sequence

from bench.placement.traces import Planned

_LATE_S = 180.0
"""After the last request was sent, answers have so long."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What became of a request."""

    first_s: float | None = None
    """From when it was sent to its first token."""
    took_s: float | None = None
    late_s: float = 0.0
    """How much later than planned it was sent."""
    problem: str = ""


def bodies(planned: Sequence[Planned]) -> list[bytes]:
    """The requests as sent, made beforehand."""
    return [
        json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": one.prompt()}],
                "max_tokens": one.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for one in planned
    ]


async def replay(port: int, planned: Sequence[Planned], made: Sequence[bytes]) -> list[Answer]:
    """Send all of them and wait for their answers."""
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    start_s = time.perf_counter() + 0.2
    answers = [Answer() for _ in planned]
    tasks = []
    for one, body, answer in zip(planned, made, answers, strict=True):
        due_s = start_s + one.at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        answer.late_s = time.perf_counter() - due_s
        ended: asyncio.Future[None] = loop.create_future()
        client = _Client(body, answer, ended)
        tasks.append(asyncio.create_task(_send(port, client, ended)))
    _, late = await asyncio.wait(tasks, timeout=_LATE_S)
    for task in late:
        task.cancel()
    for answer in answers:
        if answer.took_s is None and not answer.problem:
            answer.problem = "no end"
    gc.unfreeze()
    return answers


async def _send(port: int, client: _Client, ended: asyncio.Future[None]) -> None:
    try:
        await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
        await ended
    except OSError as error:
        client.answer.problem = str(error)


class _Client(asyncio.Protocol):
    """One connection with one request. Tokens are not looked at, only whether there is any."""

    def __init__(self, body: bytes, answer: Answer, ended: asyncio.Future[None]) -> None:
        self.answer = answer
        self._body = body
        self._ended = ended
        self._sent_s = time.perf_counter()
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "it is a TCP connection"
        self._transport = transport
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(self._body)
        )
        transport.write(self._body)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer.first_s is None:
            self._head += data
            if b'"content":"' in self._head.replace(b'"content":""', b""):
                answer.first_s = time.perf_counter() - self._sent_s
        self._tail = self._tail[-20:] + data
        if b"[DONE]" in self._tail:
            answer.took_s = time.perf_counter() - self._sent_s
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer.took_s is None:
            self.answer.problem = (self._head[:200] or b"closed").decode(errors="replace")
        if not self._ended.done():
            self._ended.set_result(None)
