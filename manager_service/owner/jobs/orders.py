"""Makes the messages that a job sends to workers, from its spec, its files and its state."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from common.bus.bus import Out
from common.bus.streams import Cell, partition_of
from common.wire.messages import (
    AdapterNew,
    AdapterRef,
    Cancel,
    Failure,
    Init,
    Sampling,
    ScoredTrajectory,
    Start,
    TrainStep,
    TrajectoryRef,
    TurnRequest,
)
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.groups import Group, pack
from manager_service.owner.jobs.items import Items, Shuffle
from manager_service.owner.jobs.open_trajectories import TrajectoryKey
from manager_service.records.file_records import uploaded_path
from manager_service.records.job_records import JobSpec, JobState, is_untrained


class Orders:
    """Builds a job's messages, each with the stream it goes to."""

    def __init__(self, cell: Cell, spec: JobSpec, items: Items, eval_items: Items) -> None:
        self._cell = cell
        self._spec = spec
        self._items = items
        self._eval_items = eval_items
        self._shuffle = Shuffle(spec.seed, len(items)) if len(items) else None

    def init(self, state: JobState) -> Out:
        """Asks for version 0."""
        spec = self._spec
        adapter = AdapterRef(spec.tenant, spec.id, 0)
        message = Init(
            id=f"{spec.id}/init",
            **self.about(state),
            adapter=adapter,
            seed=spec.seed,
            lora=spec.hyper.lora,
            source=spec.source,
            file=uploaded_path(spec.tenant, spec.adapter_file) if spec.adapter_file else "",
            base_digest=spec.adapter_base,
        )
        return self._cell.train, message

    def start(self, state: JobState, version: int, keys: Sequence[TrajectoryKey]) -> Out:
        """Asks for trajectories of one item and purpose, sampled by this version."""
        spec, hyper, first = self._spec, self._spec.hyper, keys[0]
        temperature = 0.0 if first.purpose == "eval_greedy" else hyper.temperature
        message = Start(
            id=f"{spec.id}/{first}/{state.attempt}",
            **self.about(state),
            adapter=AdapterRef(spec.tenant, spec.id, version),
            purpose=first.purpose,
            seed=spec.seed,
            group=first.group,
            samples=tuple(key.sample for key in keys),
            attempt=state.attempt,
            item=self.item_of(first),
            env=spec.env,
            sampling=Sampling(temperature=temperature, max_tokens=hyper.max_tokens, max_context=hyper.max_context or 0),
            max_turns=hyper.max_turns,
            tool_timeout_s=hyper.tool_timeout_s,
            weight=spec.weight,
            untrained=is_untrained(spec, version),
        )
        return self._cell.env, message

    def again(self, state: JobState, request: TurnRequest) -> Out:
        """Asks to go on with a turn that a pause has stopped."""
        trajectory = msgspec.structs.replace(request.trajectory, attempt=state.attempt)
        identity = f"{request.id.rsplit('/', 1)[0]}/{state.attempt}"
        message = msgspec.structs.replace(request, id=identity, epoch=state.epoch, trajectory=trajectory)
        return self._cell.rollout_first, message

    def step(self, state: JobState, batch: list[tuple[int, Group]], next_group: int) -> TrainStep:
        """Asks to train the newest version on these groups. An empty batch has no signal: the weights stay."""
        spec, hyper = self._spec, self._spec.hyper
        return TrainStep(
            id=f"{spec.id}/step{state.version + 1}/{state.attempt}",
            **self.about(state),
            adapter=AdapterRef(spec.tenant, spec.id, state.version),
            seed=spec.seed,
            lora=hyper.lora,
            loss=msgspec.structs.replace(hyper.loss, truncate_ratios=state.truncate_ratios),
            optim=hyper.optim,
            rows=pack(batch),
            trajectories=tuple(scored.message.id for _, group in batch for scored in group.rows()),
            next_group=next_group,
            weight=spec.weight,
            untrained=is_untrained(spec, state.version),
        )

    def cancel(self, state: JobState, *, park: bool) -> Out:
        """Declares void all that was sent up to now."""
        identity = f"{self._spec.id}/cancel{state.epoch}"
        return self._cell.control, Cancel(id=identity, **self.about(state), park=park)

    def new_version(self, state: JobState, adapter: AdapterRef) -> Out:
        """Hints to rollout workers that turns will soon name this version."""
        identity = f"{self._spec.id}/new{adapter.version}"
        return self._cell.adapters_new, AdapterNew(id=identity, **self.about(state), adapter=adapter)

    def failed(
        self, state: JobState, key: TrajectoryKey, version: int, attempt: int, failure: Failure
    ) -> ScoredTrajectory:
        """Makes the result of a trajectory of which no worker can send one."""
        spec = self._spec
        return ScoredTrajectory(
            id=f"{spec.id}/{key}/lost/{attempt}",
            **self.about(state),
            adapter=AdapterRef(spec.tenant, spec.id, version),
            trajectory=TrajectoryRef(key.purpose, spec.seed, key.group, key.sample, attempt),
            stop_reason="failed",
            failure=failure,
        )

    def item_of(self, key: TrajectoryKey) -> dict[str, Any] | None:
        """The item of a trajectory; evaluations go in file order."""
        return self.item(key.group) if key.purpose == "train" else self._eval_items[key.group]

    def item(self, group: int) -> dict[str, Any] | None:
        """The item of a group. None: the environment makes its own."""
        return self._items[self._shuffle.place(group)] if self._shuffle else None

    def about(self, state: JobState) -> dict[str, Any]:
        """Fields that every message about the job has; see `Message.about`."""
        tenant = self._spec.tenant
        return {"tenant": tenant, "job": self._spec.id, "partition": partition_of(tenant), "epoch": state.epoch}


def give_homes(changes: Iterable[Changes], lora_slots: Mapping[str, int], *, num_jobs: int) -> None:
    """Gives all that begins a home. `lora_slots`: workers with the number of adapters that each batches. `num_jobs`: active ones."""
    if not lora_slots or num_jobs <= min(lora_slots.values()):
        return
    for change in changes:
        for index, (stream, message) in enumerate(change.published):
            if isinstance(message, Start):
                home = home_of(message.job, lora_slots)
                change.published[index] = stream, msgspec.structs.replace(message, home=home)


def home_of(job: str, workers: Collection[str]) -> str:
    """Chooses by rendezvous hashing: a worker that comes or goes moves no job between two others."""
    return max(workers, key=lambda worker: hashlib.sha256(f"{worker} {job}".encode()).digest())
