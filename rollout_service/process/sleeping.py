"""Puts an engine's process to sleep, so that others may have the device's memory, and finds out whether it wakes as it was.

    awake ─ sleep ─► no memory, no adapters ─ wake ─► scores a fixed prompt as before it ever slept, bare and with an adapter

After an error nobody knows what the process holds, or what it would sample: whoever put it to sleep ends, and the process with it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from statistics import fmean
from typing import Any

from common.errors import Unavailable
from rollout_service.process.core import AdapterFolder, Core, CoreDied, SamplingRequest, UnreadableAdapter

LIMIT_S = 300.0
"""A process that has not fallen asleep, or awoken, in this time hangs."""
MOST_GAP = 0.1
"""Scores differ by less, as a mean over the prompt's tokens, if nothing is wrong: kernels may add in another order."""
PROMPT_TOKENS = 16


class Sleeping:
    """Puts one process to sleep and wakes it, and knows how it scored a fixed prompt when it was new."""

    def __init__(self, vocab: int, context: int, make_canary: Callable[[], AdapterFolder]) -> None:
        """`make_canary` writes an adapter that changes scores by more than MOST_GAP."""
        self._prompt = [17 * n % vocab for n in range(min(PROMPT_TOKENS, context - 1))]
        self._make_canary = make_canary
        self._canary: AdapterFolder | None = None
        self._num_scored = 0
        self._scores: list[list[float]] = []

    async def sleep(self, core: Core, base: AdapterFolder) -> None:
        self._scores = self._scores or await self._score(core, base)
        await core.sleep()

    async def wake(self, core: Core, base: AdapterFolder) -> None:
        """Returns when it can sample, and has `base` alone. Raises CoreDied where it woke as another."""
        await core.wake()
        await core.add(base)
        pairs = zip(await self._score(core, base), self._scores, strict=True)
        gaps = [fmean(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
        if not max(gaps) <= MOST_GAP:
            raise CoreDied(
                f"it scores a prompt otherwise than before, by {gaps[0]:.2g} bare, {gaps[1]:.2g} with an adapter"
            )

    async def _score(self, core: Core, base: AdapterFolder) -> list[list[float]]:
        """Log-probs of the prompt's tokens, bare and with the canary."""
        self._canary = canary = self._canary or await asyncio.to_thread(self._make_canary)
        await core.add(canary)
        scores = [await self._score_with(core, adapter) for adapter in (base, canary)]
        await core.remove(canary)
        return scores

    async def _score_with(self, core: Core, adapter: AdapterFolder) -> list[float]:
        self._num_scored += 1
        name = f"canary-{self._num_scored}"  # also its salt: nothing that is cached shall answer
        request = SamplingRequest(name, self._prompt, adapter, name, 0.0, 1.0, 0, 1, (), None, prompt_logprobs=True)
        return [score async for chunk in core.sample(request) for score in chunk.prompt_logprobs]


async def in_time(what: str, work: Coroutine[Any, Any, None]) -> None:
    """Raises Unavailable if it fails or hangs."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await work
    except (CoreDied, UnreadableAdapter, TimeoutError) as error:
        reason = str(error) or f"it hangs for {LIMIT_S:.0f} s"
        raise Unavailable(f"the engine's process did not {what}: {reason}") from error
