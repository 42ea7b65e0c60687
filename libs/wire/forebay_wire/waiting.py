"""A wait that has not begun holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """Awaited once, it runs a coroutine. Unlike the coroutine it can be dropped before: a task that
    is cancelled before its first step never comes to await it."""

    __slots__ = ("_begin",)

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, None, T]:
        return self._begin().__await__()
