"""Simulated rollout workers that cost little, so that managers and Redis have the processor of a benchmark to themselves.

To Redis and to the owners each is `stand_in_worker` around `OneTurnRollout`: it reads, renews, takes over, settles and reports at the
same pace, by the same commands and the same script, and what it publishes has the same bytes; `tests/benchmarks/test_light_rollout.py`
holds the two together. It saves on its own side alone: trajectories have one heap of ends instead of a task and a timer each; an answer is
made of its request's bytes, without decoding the one and encoding the other; and what constant parts have in common is known.

    reads: rollout   writes: scored:<p>, telemetry   waits for: an entry, the next end
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from common.bus import Bus, Settlement
from common.messages import AdapterRef, EnvSpec, Message, Sampling, Start, TurnRequest
from common.repeats import num_same, num_same_at_end, sent_once
from common.scripts import SETTLE
from common.settler import MOST_S
from common.streams import GROUP_ROLLOUT, Cell
from common.takeover import LOOK_EVERY_S
from common.tasks import running
from common.telemetry import KEEP_S, MAX_SPANS, Reporter
from common.wire import decode, encode
from common.worker import GATHER_S, MOST_READ_S, REPORT_EVERY_S
from harness.standin import OneTurnEnv, OneTurnRollout

TENANT, PARTITION, SAMPLE, TURN, TRANSCRIPT = (
    b"\xa6tenant",
    b"\xa9partition",
    b"\xa6sample",
    b"\xa4turn",
    b"\xaatranscript",
)
"""Names of fields as they stand in a payload. From `tenant` up to `turn` a request says what its answer says up to `transcript`."""
LARGEST_BYTE = 0x7F
"""Numbers up to it are one byte in a payload."""


class Answer(NamedTuple):
    """A payload in two parts, and the partition to which it goes. `end`: one of two that many have; empty: it is in `head` too."""

    partition: int
    head: bytes
    end: bytes

    @property
    def payload(self) -> bytes:
        return self.head + self.end


class Answers:
    """The payloads of `OneTurnRollout`'s answers to the requests of `OneTurnEnv`."""

    def __init__(self, cell: Cell) -> None:
        self._rollout = OneTurnRollout(cell)
        env = OneTurnEnv(cell)
        even, odd = (encode(self._rollout.scored(env.turn(_EXAMPLE, sample))) for sample in (0, 1))
        trained, untrained = (encode(env.turn(replace(_EXAMPLE, untrained=each), 0)) for each in (False, True))
        self._kind = trained[1 : trained.index(TENANT)]
        self._asked = [(form[form.index(TURN) :], even[0] - form[0]) for form in (trained, untrained)]
        self._begin = even[1 : even.index(TENANT)]
        self._ends = even[even.index(TRANSCRIPT) :], odd[odd.index(TRANSCRIPT) :]
        self._num_alike = num_same_at_end(*self._ends)

    def to(self, request: bytes) -> Answer:
        num_kind = 1 + len(self._kind)
        for end, more_fields in self._asked if request[1:num_kind] == self._kind else ():
            if request.endswith(end):
                same = request[num_kind : -len(end)]
                partition, sample = _number(same, PARTITION), _number(same, SAMPLE)
                if max(partition, sample) <= LARGEST_BYTE:
                    head = b"%c%b%b" % (request[0] + more_fields, self._begin, same)
                    return Answer(partition, head, self._ends[sample % 2])
        return self._ordinary(request)

    def _ordinary(self, request: bytes) -> Answer:
        message = cast(TurnRequest, decode(request))
        return Answer(message.partition, encode(self._rollout.scored(message)), b"")

    def sent(self, answers: Sequence[Answer]) -> list[list[Any]]:
        """The fields of their entries, as `sent_once` gives them."""
        first: list[list[Any]] = [["payload", answer.payload] for answer in answers[:1]]
        return [*first, *(self._after(before, answer) for before, answer in pairwise(answers))]

    def _after(self, before: Answer, answer: Answer) -> list[Any]:
        """Compares the heads alone: how much the ends have in common is known."""
        same = num_same(before.head, answer.head)
        if not before.end or not answer.end or same == min(len(before.head), len(answer.head)):
            return sent_once([["payload", before.payload], ["payload", answer.payload]])[1]
        tail = self._num_alike
        if before.end is answer.end:
            tail = len(answer.end) + num_same_at_end(before.head[same:], answer.head[same:])
        payload = answer.payload
        return ["like", same, tail, payload[same : len(payload) - tail]]


_ADAPTER = AdapterRef("tenant", "job", 0)
_EXAMPLE = Start(
    tenant="tenant",
    job="job",
    partition=0,
    id="start",
    adapter=_ADAPTER,
    purpose="train",
    seed=0,
    group=0,
    samples=(0, 1),
    item=None,
    env=EnvSpec("single_turn"),
    sampling=Sampling(),
)


def _number(payload: bytes, name: bytes) -> int:
    """The first byte of a field's value: the value itself, if it is no larger than LARGEST_BYTE."""
    return payload[payload.index(name) + len(name)]


class Turn(NamedTuple):
    """A request under way. `noted`: its message, if the worker's report tells of it."""

    end_s: float
    number: int
    entry: bytes
    request: bytes
    noted: Message | None


class LightRollout:
    """Takes turns, and answers each after `seconds`, until `stop` is set; then hands back what it holds."""

    def __init__(self, bus: Bus, reporter: Reporter, seconds: Callable[[], float], *, lease_s: float) -> None:
        self._bus = bus
        self._reporter = reporter
        self._seconds = seconds
        self._lease_s = lease_s
        self._name = reporter.worker
        self._stream = bus.cell.rollout
        self._answers = Answers(bus.cell)
        self._script = bus.client.register_script(SETTLE)
        self._numbers = itertools.count()
        self._underway: list[Turn] = []  # a heap, the next to end first
        self._ended: list[Turn] = []
        self._some = asyncio.Event()
        self._num_noted = 0
        self.num = 0  # answered

    async def run(self, stop: asyncio.Event) -> None:
        await self._bus.ensure_group(self._stream, GROUP_ROLLOUT)
        async with running(self._read(), self._settle(), self._renew(), self._take_over(), self._report()):
            await stop.wait()
        await self._hand_back()
        await self._broadcast("stopped")

    # ---- from the stream to the next end ----------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self._reporter.about.slots - len(self._underway)

    def _window_s(self, most_s: float) -> float:
        """Seconds for which entries wait for others, as in `Worker`."""
        return min(GATHER_S * len(self._underway), most_s)

    async def _read(self) -> None:
        read_s = 0.0
        while True:
            await asyncio.sleep(read_s + self._window_s(MOST_READ_S) - time.monotonic())
            while not self._end_due() and self._free <= 0:
                await asyncio.sleep(self._underway[0].end_s - time.monotonic())
            call = partial(
                self._bus.client.xreadgroup, GROUP_ROLLOUT, self._name, {self._stream: ">"}, count=self._free, block=500
            )
            found: Any = await self._bus.retrying(call, block_ms=500)
            rows = [row for pages in (found or {}).values() for page in pages for row in page]
            for entry, fields in rows:
                self._begin(entry, fields[b"payload"])
            if rows:
                self._reporter.first_read([entry.decode() for entry, _ in rows])
                read_s = time.monotonic()

    def _begin(self, entry: bytes, request: bytes) -> None:
        message = None
        if self._num_noted < MAX_SPANS:
            message = cast(TurnRequest, decode(request))
            self._num_noted += 1
            self._reporter.timeline.begin(message.tenant, message.job, "rollout")
        turn = Turn(time.monotonic() + self._seconds(), next(self._numbers), entry, request, message)
        heapq.heappush(self._underway, turn)
        self._some.set()

    def _end_due(self) -> int:
        """Returns the number that ended since the last call."""
        now, before = time.monotonic(), len(self._ended)
        while self._underway and self._underway[0].end_s <= now:
            turn = heapq.heappop(self._underway)
            if turn.noted:
                self._num_noted -= 1
                self._reporter.timeline.end(turn.noted.tenant, turn.noted.job, "rollout")
            self._ended.append(turn)
        return len(self._ended) - before

    # ---- settling ---------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        since_s = 0.0
        while True:
            await self._one_ended()
            await asyncio.sleep(since_s + self._window_s(MOST_S) - time.monotonic())
            since_s = time.monotonic()
            self._end_due()
            ended, self._ended = self._ended, []
            call = partial(self._script, keys=[self._stream], args=self.settling([(t.entry, t.request) for t in ended]))
            settled: Any = await self._bus.retrying(call)
            num = sum(entries != 0 for entries in settled)
            self._count(num, len(ended) - num, time.monotonic() - since_s)

    def _count(self, num: int, lost: int, seconds: float) -> None:
        self.num += num
        self._reporter.count("settle_s", seconds * (num + lost))
        self._reporter.count("settled", num)
        self._reporter.count("lost_races", lost)

    async def _one_ended(self) -> None:
        """Waits until a turn has ended that is not settled."""
        while not self._ended and not self._end_due():
            self._some.clear()
            if self._underway:
                await asyncio.sleep(self._underway[0].end_s - time.monotonic())
            else:
                await self._some.wait()

    def settling(self, turns: Sequence[tuple[bytes, bytes]]) -> list[Any]:
        """Arguments of the script, as `Bus.settling` makes them. `turns`: entries and their payloads."""
        cell, source, target = self._bus.cell, [self._bus.cell.name_of(self._stream), GROUP_ROLLOUT], -1
        answers = [self._answers.to(request) for _, request in turns]
        arguments: list[Any] = [cell.key(""), len(turns)]
        for (entry, _), answer, fields in zip(turns, answers, self._answers.sent(answers), strict=True):
            to = "" if answer.partition == target else cell.name_of(cell.scored(answer.partition))
            arguments += [*source, entry, 1, "", "", to, "=", len(fields), *fields]
            source, target = [""], answer.partition
        return arguments

    # ---- beside that ------------------------------------------------------------------------------------------------

    def _entries(self) -> list[str]:
        return [turn.entry.decode() for turn in self._underway]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._bus.renew(self._stream, GROUP_ROLLOUT, self._name, self._entries())

    async def _take_over(self) -> None:
        every_s, lease_ms = min(LOOK_EVERY_S, self._lease_s / 4), int(1000 * self._lease_s)
        while True:
            await asyncio.sleep(every_s)
            idle = await self._bus.find_idle(
                self._stream, GROUP_ROLLOUT, min_idle_ms=lease_ms, every_ms=int(500 * every_s), own=self._entries()
            )
            taken = await self._bus.claim(self._stream, GROUP_ROLLOUT, self._name, idle, min_idle_ms=lease_ms)
            for delivery in taken:
                self._begin(delivery.entry.encode(), encode(cast(TurnRequest, delivery.message)))

    async def _report(self) -> None:
        while True:
            await self._broadcast("busy" if self._underway else "idle")
            await asyncio.sleep(REPORT_EVERY_S)

    async def _broadcast(self, state: str) -> None:
        report = self._reporter.report(state, len(self._underway))
        await self._bus.broadcast(self._bus.cell.telemetry, report, keep_s=KEEP_S)

    async def _hand_back(self) -> None:
        while held := await self._bus.read_pending(self._stream, GROUP_ROLLOUT, self._name):
            await self._bus.settle([Settlement(delivery, None) for delivery in held])
