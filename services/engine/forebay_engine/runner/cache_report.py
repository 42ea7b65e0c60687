"""What the engine has in its prefix cache, told by the names of the prompts that ran.

A back end tells of prompts and blocks as they come, which costs a request next to nothing; what
they amount to is worked out in between, some of them at a time, and told from here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay_common.cache_feed import CacheFeed
from forebay_common.prefixes import prefix_hashes

from forebay_engine.core.block_tree import Block
from forebay_engine.core.prefix_cache import PrefixCache, Prompt
from forebay_engine.runner.backend import Call

_log = logging.getLogger(__name__)
_INTERVAL_S = 0.05
_PROMPTS_MAX = 4096
"""So many prompts wait to be worked out; what comes on top of them is left out."""
_TOKENS_MAX = 8 << 20
"""Likewise their tokens, all together."""


class _Ran(NamedTuple):
    write: Callable[[], bytes]
    tokens: int
    blocks: Callable[[], Sequence[Block]]
    block_tokens: int


class CacheReport:
    """The report of one engine. Used from one event loop only."""

    def __init__(self, model_version: str, *, names_max: int, blocks_max: int) -> None:
        """At most `names_max` names of prompts and `blocks_max` blocks are kept; see
        `PrefixCache`. Of no names at all, nothing is told."""
        self.cache = PrefixCache(names_max=names_max, blocks_max=blocks_max)
        self.feed = CacheFeed(names_max=names_max)
        self.blocks_max = blocks_max
        self._model = model_version
        self._is_wanted = names_max > 0
        self._begun = False
        self._take_in: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._ran: deque[_Ran] = deque()
        self._tokens = 0
        self._wake = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether anything is told."""
        return self._is_wanted

    def begin(self) -> None:
        """From now on it is known what the engine has."""
        if self._is_wanted and not self._begun:
            self._begun = True
            self.feed.begin(self._model)

    def end(self) -> None:
        """It cannot be known any more."""
        self._begun = self._is_wanted = False
        if self._stop is not None:
            self._stop()
        self._take_in = self._stop = None
        self._ran.clear()
        self.cache.cleared()
        self.feed.end(self._model)

    def read_from(self, take_in: Callable[[], None], *, stop: Callable[[], None]) -> None:
        """Have what the engine told taken in before each report, until it is to stop."""
        self._take_in, self._stop = take_in, stop

    def wake(self) -> None:
        """Say that there is something to report."""
        self._wake.set()

    def ran(
        self,
        call: Call,
        *,
        tokens: int,
        blocks: Callable[[], Sequence[Block]],
        block_tokens: int,
    ) -> None:
        """A call's prompt was given to the engine; of several of one call, the first counts.

        Args:
            call: whose prompt.
            tokens: of the prompt.
            blocks: gives the prompt's full blocks, later.
            block_tokens: of each block.
        """
        write, call.prompt = call.prompt, None
        if (
            write is None
            or not self._is_wanted
            or len(self._ran) >= _PROMPTS_MAX
            or self._tokens + tokens > _TOKENS_MAX
        ):
            return
        self._tokens += tokens
        self._ran.append(_Ran(write, tokens, blocks, block_tokens))
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._work_out()
            except Exception:
                # Requests must not suffer from it, and a wrong report is worse than none.
                _log.exception("the prefix cache is no longer reported")
                self.end()
            await asyncio.sleep(_INTERVAL_S)

    async def _work_out(self) -> None:
        if self._take_in is not None:
            self._take_in()
        while self._ran:
            ran = self._ran.popleft()
            self._tokens -= ran.tokens
            prompt = ran.write()
            if names := prefix_hashes(prompt):
                self.cache.note(
                    Prompt(names, len(prompt), ran.tokens, ran.blocks(), ran.block_tokens)
                )
            # A long prompt takes milliseconds.
            await asyncio.sleep(0)
        stored, removed = self.cache.take_changes()
        if self._begun and (stored or removed):
            self.feed.tell(self._model, stored=stored, removed=removed)
