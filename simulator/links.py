"""Simulates how versions reach workers: over links that all who use them at once share evenly, from the store or along chains."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from common.wire.messages import AdapterRef
from simulator.calibration import Size
from simulator.clock import Act, Clock

SMALLEST_PART, LARGEST_PART, NUM_PARTS = 128 << 10, 8 << 20, 512
"""Bytes of a part, and parts of a file: a chain passes a part on once it has the whole of it."""
LOADED_S = 600.0
"""With a relay, a worker loads a new version ahead if it had a turn of the job within so many seconds."""
ALMOST = 1e-6
"""Bytes below which nothing is left, as a part of a file."""


@dataclass(slots=True, eq=False)
class Pull:
    """A version on its way to a worker, or there."""

    worker: object
    left: float  # bytes
    adapter: AdapterRef | None = None  # None: a trainer writes it
    number: int = 0  # of those who joined
    holder: "Pull | None" = None  # whom it follows; None: the store
    rate: float = 0.0  # bytes a second
    here_s: float = inf  # when it was whole
    acts: list[Act] = field(default_factory=list[Act])


@dataclass
class Links:
    """The store's link, each worker's in both directions, and the chains that form on them.

    Who joins a chain follows the live holder without a follower that has most, as `common/peers` lets it; the first reads the
    store. `size.adapter_bytes` 0: versions are there when they are announced.
    """

    clock: Clock
    load_s: float  # from a file to the engine
    size: Size
    _files: defaultdict[AdapterRef, dict[object, Pull]] = field(default_factory=lambda: defaultdict(dict))
    _announced_s: dict[AdapterRef, float] = field(default_factory=dict)
    _ahead: list[tuple[float, list[Pull]]] = field(default_factory=list[tuple[float, list[Pull]]])  # and when it began
    _used_s: dict[tuple[object, str], float] = field(default_factory=dict)  # (worker, job) -> its last turn
    _active: list[Pull] = field(default_factory=list)  # holders before their followers
    _joined: int = 0
    _synced_s: float = 0.0
    _plan: int = 0

    @property
    def spread_s(self) -> list[float]:
        """Seconds from each version's announcement until the last worker that loads it ahead had it."""
        here = ((at_s, [pull.here_s for pull in pulls if pull.here_s < inf]) for at_s, pulls in self._ahead)
        return [max(each) - at_s for at_s, each in here if each]

    def announce(self, adapter: AdapterRef, workers: Iterable[object]) -> None:
        """Workers load a new version ahead: all, or with a relay those that had turns of its job."""
        now = self.clock.now
        self._announced_s[adapter] = now
        if self.size.adapter_bytes:
            soon = (each for each in workers if now - self._used_s.get((each, adapter.job), -inf) < LOADED_S)
            loading = soon if self.size.relay else workers
            self._ahead.append((now, [self._pull(each, adapter) for each in loading]))

    def when_here(self, worker: object, adapter: AdapterRef, act: Act) -> None:
        """Acts when the worker's engine can have the version."""
        self._used_s[worker, adapter.job] = self.clock.now
        if not self.size.adapter_bytes:
            self.clock.at(self._announced_s.get(adapter, -inf) + self.load_s, act)
            return
        pull = self._pull(worker, adapter)
        if pull.here_s < inf:
            self.clock.at(pull.here_s + self.load_s, act)
        else:
            pull.acts.append(act)

    def hold(self, worker: object, adapter: AdapterRef) -> None:
        """The worker has had it from the beginning."""
        self._joined += 1
        self._files[adapter][worker] = Pull(worker, 0.0, adapter, self._joined, here_s=self.clock.now)

    def write(self, act: Act) -> None:
        """Acts when a new version's bytes are in the store."""
        if self.size.adapter_bytes:
            self._change(Pull(object(), self.size.adapter_bytes, acts=[act]))
        else:
            act()

    def forget(self, worker: object) -> None:
        """The worker has ended: who followed it joins again from what it has."""
        for adapter, pulls in self._files.items():
            lost = pulls.pop(worker, None)
            if lost is None:
                continue
            if lost.here_s == inf:
                self._active.remove(lost)
            for pull in self._active:
                if pull.holder is lost:
                    pull.holder = self._holder(adapter, pull)
        self._change()

    # ---- pulls ------------------------------------------------------------------------------------------------------

    def _pull(self, worker: object, adapter: AdapterRef) -> Pull:
        if worker in self._files[adapter]:
            return self._files[adapter][worker]
        self._joined += 1
        pull = Pull(worker, self.size.adapter_bytes, adapter, self._joined)
        pull.holder = self._holder(adapter, pull)
        self._files[adapter][worker] = pull
        self._change(pull)
        return pull

    def _holder(self, adapter: AdapterRef, new: Pull) -> Pull | None:
        """Chooses among those that are whole or joined before, so that no ring forms."""
        if not self.size.relay:
            return None
        followed = {pull.holder for pull in self._active}
        able = (each for each in self._files[adapter].values() if each.here_s < inf or each.number < new.number)
        return min((each for each in able if each not in followed), key=lambda each: each.left, default=None)

    def _change(self, *begun: Pull) -> None:
        self._active += begun
        self._plan += 1
        self.clock.after(0.0, lambda plan=self._plan: self._look(plan))

    def _look(self, plan: int) -> None:
        """Ends what has arrived, and shares the links among the rest until the next arrives or catches up with its holder."""
        if plan != self._plan:
            return
        elapsed, self._synced_s = self.clock.now - self._synced_s, self.clock.now
        for pull in self._active:
            pull.left = max(0.0, pull.left - pull.rate * elapsed)
        least = ALMOST * self.size.adapter_bytes
        arrived = [pull for pull in self._active if pull.left <= least]
        self._active = [pull for pull in self._active if pull.left > least]
        for pull in arrived:
            self._arrive(pull)
        if self._active:
            self._plan += 1
            self.clock.after(self._share(), lambda plan=self._plan: self._look(plan))

    def _arrive(self, pull: Pull) -> None:
        """It was whole one part later than what it followed."""
        part = min(max(self.size.adapter_bytes / NUM_PARTS, SMALLEST_PART), LARGEST_PART)
        before_s = pull.holder.here_s + part / pull.rate if pull.holder else 0.0
        pull.left, pull.here_s = 0.0, max(self.clock.now, before_s)
        for act in pull.acts:
            self.clock.at(pull.here_s + (self.load_s if pull.adapter else 0.0), act)
        pull.acts.clear()

    def _share(self) -> float:
        """Sets the rates. Returns the seconds for which they hold."""
        size, into = self.size, Counter(pull.worker for pull in self._active)
        out = Counter(pull.holder and pull.holder.worker for pull in self._active)
        holds_s = inf
        for pull in self._active:
            holder = pull.holder
            source = size.link_bytes_per_s if holder else size.store_bytes_per_s
            pull.rate = min(source / out[holder and holder.worker], size.link_bytes_per_s / into[pull.worker])
            ahead = pull.left - holder.left if holder and holder.here_s == inf else inf
            if holder and pull.rate > holder.rate and ahead < inf:
                if ahead <= ALMOST * size.adapter_bytes:
                    pull.rate = holder.rate
                else:
                    holds_s = min(holds_s, ahead / (pull.rate - holder.rate))
            holds_s = min(holds_s, pull.left / pull.rate)
        return holds_s
