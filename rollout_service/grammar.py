"""Follows turns through their grammars: says which tokens may come next. For engines that mask tokens themselves.

Axis: V vocabulary.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidInput
from common.text.grammars import LIMITS, fault_of
from common.wire.messages import TurnRequest
from rollout_service.engine import Tokenizer

NUM_KEPT = 4
"""Grammars of which the next turn gets a copy, as the choices of one request do."""


class Guide:
    """One turn's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on behind these. Raises InvalidInput if the grammar does not allow them."""
        for token in tokens:  # all at once, an end-of-turn token behind the last that is allowed would be an error
            self._matcher.consume_token(token)
        self._check()

    def allowed(self) -> np.ndarray:
        """bool [V]: what may come next; an end-of-turn token where the answer may end. Raises InvalidInput if that costs too much."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(mask, count=self._vocab, bitorder="little").astype(bool)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(f"the answer cannot follow its grammar: {fault_of(self._matcher)}")


class Grammars:
    """Makes the guides of one base model's turns: one at a time, in a thread that nothing else waits for."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._known = tokenizer
        self._vocab = vocab
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._matcher = lru_cache(NUM_KEPT)(self._new_matcher)

    async def guide(self, request: TurnRequest) -> Guide:
        """Stands behind the turn's tokens so far. May take a second. Raises InvalidInput for what is no grammar, or not theirs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guide, request)

    def _new_matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)

    def _guide(self, request: TurnRequest) -> Guide:
        guide = Guide(self._matcher(request.sampling.grammar).deep_copy(), self._vocab)
        guide.take(request.tokens.numpy()[request.num_prompt :].tolist())
        return guide

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        ends = list(self._known.end_of_turn_ids)
        return LLTokenizer(self._known.to_json(), n_vocab=self._vocab, eos_token=ends)
