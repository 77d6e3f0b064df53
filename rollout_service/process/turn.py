"""Holds one turn of the process engine: its tokens so far, what is left of it, when it ends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.rng import bits
from common.wire.messages import EMPTY_F32, Array, StopReason, Tops, TurnRequest
from rollout_service.engine import Beat, Generated, OnToken, Partial
from rollout_service.process.core import AdapterFolder, CoreDied, SamplingRequest, TokenChunk
from rollout_service.turns import first_scored, first_stop, prompt_array, prompt_tops

ALL_TOKENS = 2**31 - 1
"""A `top_k` that keeps all tokens of any vocabulary: engines take no larger number."""
SEED_BITS = 63
"""Engines take seeds of a signed 64-bit integer."""


class NotFinite(Exception):
    """A log-probability is not a number."""


@dataclass(slots=True, eq=False)
class OpenTurn:
    """One turn under way. Axis: N tokens of the turn, those that the request brought first."""

    request: TurnRequest
    context: int  # the most tokens of the sequence
    end_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]  # special tokens included
    beat: Beat
    on_token: OnToken | None = None
    tokens: list[int] = field(default_factory=list[int])  # [N]
    logprobs: list[float] = field(default_factory=list[float])  # [N]
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    busy_s: float = 0.0
    num_requests: int = 0  # how often a process was asked to go on with it
    deaths: int = 0  # processes that died under it
    not_finite: int = 0  # processes in which its log-probs were no numbers
    prompt_logprobs: Array = EMPTY_F32  # as in `Generated`
    prompt_top_logprobs: Tops = field(default_factory=Tops)
    num_cached: int = 0  # tokens of the sequence whose keys and values a process had
    stop_string: str = ""
    stop_reason: StopReason | None = None  # None: it goes on

    def __post_init__(self) -> None:
        first = self.request.num_prompt
        self.tokens = self.request.tokens.numpy()[first:].tolist()
        self.logprobs = self.request.logprobs.numpy()[first:].tolist()
        self.stop_reason = self._reason()

    @property
    def is_over(self) -> bool:
        return self.stop_reason is not None and not self._lacks_prompt

    @property
    def num_sampled(self) -> int:
        """The number of the last tokens that were sampled here."""
        return len(self.tokens) - self.request.num_partial

    @property
    def is_suspect(self) -> bool:
        """Says whether it may be what harms the process; it then runs with no other turn."""
        return self.deaths >= 2 or self.not_finite >= 1

    def next_request(self, name: str, adapter: AdapterFolder) -> SamplingRequest:
        """A request for the rest of the turn. A resumed one whose user gave a seed draws from its own stream: see `seed`. With no token
        to come it asks for the prompt's log-probs; the one token that the process must sample is dropped.
        """
        self.num_requests += 1
        sampling, request = self.request.sampling, self.request
        if sampling.grammar:  # which a process follows from the first token that it samples
            self.tokens, self.logprobs, self.top_logprobs = [], [], []
        sequence = request.tokens.numpy()[: request.num_prompt].tolist()
        if self.stop_reason is None:
            sequence += self.tokens
        return SamplingRequest(
            id=name,
            tokens=sequence,
            adapter=adapter,
            salt=f"{request.tenant} {request.adapter if request.untrained else adapter.number}",
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            num_top_logprobs=sampling.num_top_logprobs,
            max_tokens=max(1, min(sampling.max_tokens - len(self.tokens), self.context - len(sequence))),
            end_ids=self.end_ids,
            seed=self.seed() if sampling.seeded else None,
            top_k=min(sampling.top_k, ALL_TOKENS),
            grammar=sampling.grammar,
            prompt_logprobs=self._lacks_prompt,
            chat=request.chat,
            by_token=bool(self.on_token or sampling.stop),
        )

    def seed(self) -> int:
        """A seed of the job's seed, trajectory, turn and position, so that no two streams are equal."""
        ref = self.request.trajectory
        coordinates: Sequence[Any] = (ref.group, ref.sample, self.request.turn, len(self.tokens))
        return int(bits(*ref.sampling_stream, *coordinates)) & ((1 << SEED_BITS) - 1)

    def take(self, chunk: TokenChunk) -> None:
        """Adds tokens up to the turn's end and forgets those beyond it. Raises NotFinite, CoreDied."""
        before, self.num_cached = len(self.tokens), max(self.num_cached, chunk.num_cached)
        if self._lacks_prompt:
            self._take_prompt(chunk)
        try:
            for index, token in enumerate(chunk.tokens):
                if self.stop_reason:
                    return
                if not math.isfinite(chunk.logprobs[index]):
                    raise NotFinite(f"the log-probability of token {len(self.tokens)} is not a number")
                self._append(token, chunk.logprobs[index], chunk.top_logprobs[index : index + 1])
        finally:
            if self.on_token and not self.request.sampling.grammar and len(self.tokens) > before:
                self.on_token(self.tokens[before:], self.logprobs[before:])

    @property
    def _lacks_prompt(self) -> bool:
        return bool(self.request.sampling.prompt_logprobs) and not len(self.prompt_logprobs)

    def _take_prompt(self, chunk: TokenChunk) -> None:
        """Keeps the requested scores of all tokens but the first. Raises NotFinite, CoreDied."""
        first, num = first_scored(self.request), self.request.num_prompt
        wanted = chunk.prompt_logprobs[first - 1 : num - 1]
        if len(wanted) < num - first:
            raise CoreDied("it gave no log-probabilities of the prompt")
        if not all(map(math.isfinite, wanted)):
            raise NotFinite("the log-probability of a prompt token is not a number")
        self.prompt_logprobs = prompt_array(self.request, wanted)
        self.prompt_top_logprobs = prompt_tops(self.request, chunk.prompt_top_logprobs[first - 1 : num - 1])

    def _append(self, token: int, logprob: float, top: list[list[tuple[int, float]]]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs += top
        self.stop_string = first_stop(self.request.sampling.stop, self.tokens, self.decode)
        self.stop_reason = "stop" if self.stop_string else self._reason()

    def _reason(self) -> StopReason | None:
        if self.tokens and self.tokens[-1] in self.end_ids:
            return "stop"
        if len(self.tokens) >= self.request.sampling.max_tokens:
            return "length"
        return "context" if self.request.num_prompt + len(self.tokens) >= self.context else None

    def partial(self) -> Partial:
        """Without tokens where a grammar has the turn begin again in the next process: nobody shall have seen them."""
        kept = 0 if self.request.sampling.grammar else len(self.tokens)
        return Partial(self.tokens[:kept], self.logprobs[:kept], self.num_sampled, self.busy_s)

    def generated(self) -> Generated:
        assert self.stop_reason is not None, "the turn has not ended"
        return Generated(
            adapter=self.request.adapter,
            tokens=self.tokens,
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            stop_string=self.stop_string,
            top_logprobs=self.top_logprobs,
            num_sampled=self.num_sampled,
            busy_s=self.busy_s,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
        )
