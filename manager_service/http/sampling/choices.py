"""One answer that is asked for, and what each message about it says: new tokens, a result, a failure, or that its worker stops and
gives the request back.

A completion's epoch rises with every attempt. Messages of an older attempt are not used, except for a whole answer.
"""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from common.bus.streams import partition_of
from common.errors import CorruptObject, InvalidInput, Unavailable
from common.sharing.places import Claim
from common.wire.messages import (
    AdapterRef,
    GradeResult,
    Message,
    Sampling,
    TrajectoryRef,
    TurnDelta,
    TurnRequest,
    TurnResult,
    turn_id,
)
from common.wire.transcript import shown, wrote
from manager_service.records.tenants import TenantRecord

ReplyMessage = TurnDelta | TurnResult | TurnRequest | GradeResult
Beginning = tuple[str, AdapterRef, bytes]
"""Tenant, adapter, and a hash of the first tokens."""
FIRST_TOKENS = 256
"""Two prompts of samples with the same first tokens are taken for one."""
CHAT_TOKENS = [round(16 * 1.25**n) for n in range(20)]
"""A chat belongs to the conversation, or application, with which it has most of its first tokens in common: one of these numbers."""
MAX_KNOWN = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One completion request: every prompt is answered `num_choices` times."""

    tenant: TenantRecord
    adapter: AdapterRef
    prompts: Sequence[Sequence[int]]
    num_choices: int
    sampling: Sequence[Sampling]  # one a prompt
    seed: int
    stream: bool
    bulk: bool = False  # behind the first turns of jobs, and however long it takes


@dataclass(frozen=True, slots=True)
class Fresh:
    """News of one choice: tokens after those shown before, and the result once it is finished."""

    choice: int  # prompt * num_choices + sample
    tokens: list[int]
    logprobs: list[float]
    result: TurnResult | None


@dataclass(slots=True)
class Choice:
    request: TurnRequest  # the newest attempt
    prompt: Sequence[int]
    place: Claim | None = None  # held from the request to its result
    stream: str = ""  # in which the request stands, and where; empty before it has a place
    entry: str = ""
    worker: str = ""  # whose own stream that was at first
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    heard_s: float = 0.0  # monotonic: last sign of life, and last token
    advanced_s: float = 0.0
    handed_back: bool = False  # nobody works on it any more
    result: TurnResult | None = None

    @property
    def bulk(self) -> bool:
        return not self.request.chat

    @property
    def is_answered(self) -> bool:
        """Has the newest attempt given the result?"""
        return self.result is not None and self.result.request.epoch == self.request.epoch


def choices_of(job: str, ask: InferenceRequest, reply_to: str) -> list[Choice]:
    """All answers that a request asks for. Those of one prompt share its arrays."""
    return [choice for group in range(len(ask.prompts)) for choice in _choices_of(job, ask, reply_to, group)]


def _choices_of(job: str, ask: InferenceRequest, reply_to: str, group: int) -> Iterator[Choice]:
    prompt = ask.prompts[group]
    transcript = shown(prompt)
    for sample in range(ask.num_choices):
        sampling = ask.sampling[group]
        if sample and sampling.prompt_logprobs:  # the same for all, and computed once
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=0)
        trajectory = TrajectoryRef("chat", ask.seed, group, sample)
        request = TurnRequest(
            id=turn_id(job, trajectory, ask.adapter.version, 0),
            tenant=ask.tenant.id,
            job=job,
            partition=partition_of(ask.tenant.id),
            adapter=ask.adapter,
            trajectory=trajectory,
            turn=0,
            transcript=transcript,
            sampling=sampling,
            reply_to=reply_to,
            stream=ask.stream,
            chat=not ask.bulk,
        )
        yield Choice(request, prompt)


def choice_key(message: Message) -> tuple[int, int] | None:
    """(group, sample) of a turn's message: a field of requests, a part of the id of deltas."""
    request = message.request if isinstance(message, TurnResult) else message
    if isinstance(request, TurnRequest):
        return request.trajectory.group, request.trajectory.sample
    parts = message.id.split("/")
    group = parts[1].rpartition(".")[2] if len(parts) > 2 else ""
    return (int(group), int(parts[2])) if group.isdecimal() and parts[2].isdecimal() else None


def take(choice: Choice, message: ReplyMessage, index: int) -> Fresh | None:
    """The news in a message. Raises Unavailable, InvalidInput or CorruptObject for a failed turn."""
    if isinstance(message, TurnDelta):
        return _take_delta(choice, message, index)
    if isinstance(message, TurnRequest):
        return _take_back(choice, message, index)
    if not isinstance(message, TurnResult):
        return None
    current = message.request.epoch == choice.request.epoch
    if message.failure is not None or message.stop_reason in ("failed", "cancelled"):
        if not current:
            return None
        raise _refused(message)
    tokens = [int(token) for token in message.tokens.numpy()]
    known = len(choice.tokens)
    if not current and tokens[:known] != choice.tokens:
        return None
    choice.result = message
    logprobs = [float(value) for value in message.logprobs.numpy()]
    return Fresh(index, tokens[known:], logprobs[known:], message)


def _take_delta(choice: Choice, delta: TurnDelta, index: int) -> Fresh | None:
    known = len(choice.tokens)
    if delta.epoch != choice.request.epoch or delta.offset > known:
        return None
    skip = known - delta.offset
    return _take_tokens(choice, delta.tokens.numpy()[skip:], delta.logprobs.numpy()[skip:], index)


def _take_back(choice: Choice, request: TurnRequest, index: int) -> Fresh | None:
    """Takes what is new among its worker's tokens; `choice.handed_back` then says: ask for it again."""
    if request.epoch != choice.request.epoch:
        return None
    choice.request, choice.handed_back = request, True
    start = request.num_prompt + len(choice.tokens)
    return _take_tokens(choice, request.tokens.numpy()[start:], request.logprobs.numpy()[start:], index)


def _take_tokens(choice: Choice, new: np.ndarray, values: np.ndarray, index: int) -> Fresh | None:
    choice.heard_s = time.monotonic()
    if not len(new):
        return None
    tokens, logprobs = [int(token) for token in new], [float(value) for value in values]
    choice.advanced_s = choice.heard_s
    choice.tokens += tokens
    choice.logprobs += logprobs
    return Fresh(index, tokens, logprobs, None)


def _refused(result: TurnResult) -> Exception:
    failure = result.failure
    if failure is None:
        return Unavailable("the completion was cancelled")
    if failure.kind == "invalid":
        return InvalidInput(failure.reason, code="invalid_request")
    if failure.kind == "corrupt_adapter":
        return CorruptObject(f"the version is damaged: {failure.reason}")
    return Unavailable(f"the completion failed ({failure.kind}): {failure.reason}")


def continued(choice: Choice) -> TurnRequest:
    """The next attempt, which goes on after the tokens that were seen."""
    before, prompt, seen = choice.request, list(choice.prompt), choice.tokens
    trajectory = msgspec.structs.replace(before.trajectory, attempt=before.trajectory.attempt + 1)
    return msgspec.structs.replace(
        before,
        id=turn_id(before.job, trajectory, before.adapter.version, 0),
        epoch=before.epoch + 1,
        trajectory=trajectory,
        transcript=shown(prompt) + wrote(seen, choice.logprobs),
        num_partial=len(seen),
    )


class LastWorkers:
    """The rollout workers that answered last what begins like a request, and so have keys and values of it."""

    def __init__(self) -> None:
        self._known: OrderedDict[Beginning, str] = OrderedDict()
        self._num: Counter[str] = Counter()  # requests under way that were addressed to a worker

    def address(self, choice: Choice, num_workers: int) -> None:
        """Sets `choice.worker` if one is known, unless it has more than its part of what is under way."""
        self.end(choice)
        known = (self._known.get(each) for each in reversed(_beginnings(choice, choice.prompt)))
        worker = "" if choice.request.epoch else next(filter(None, known), "")
        if worker and self._num[worker] <= 1 + self._num.total() // max(1, num_workers):
            choice.worker = worker
            self._num[worker] += 1

    def end(self, choice: Choice) -> None:
        """Notes who answered, if somebody has."""
        if choice.worker:
            self._num[choice.worker] -= 1
            choice.worker = ""
        if choice.result and choice.result.worker:
            answer: list[int] = [] if choice.bulk else choice.result.tokens.numpy().tolist()
            for each in _beginnings(choice, [*choice.prompt[: CHAT_TOKENS[-1]], *answer]):
                self._known[each] = choice.result.worker
                self._known.move_to_end(each)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _beginnings(choice: Choice, tokens: Sequence[int]) -> list[Beginning]:
    """The beginnings of `tokens` by which workers are known, the longest last."""
    lengths = [FIRST_TOKENS] if choice.bulk else [num for num in CHAT_TOKENS if num <= len(tokens)]
    first = np.array(tokens[: max(lengths, default=0)], np.int32)
    digests = (hashlib.sha256(first[:num].tobytes()).digest() for num in lengths)
    return [(choice.request.tenant, choice.request.adapter, digest) for digest in digests]
