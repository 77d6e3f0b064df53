"""The job's state machine against a world in which messages come late, twice, in any order, or not at all."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.bus.streams import Cell
from common.wire.messages import (
    BASE,
    AdapterRef,
    AdapterUpdate,
    DeadLetter,
    Failure,
    Init,
    Parked,
    Sampling,
    ScoredTrajectory,
    Start,
    TrainStep,
    TrajectoryRef,
    TurnRequest,
    turn_id,
)
from common.wire.operations import Forget, Forgotten
from common.wire.transcript import shown, wrote
from harness.standin import StandInEnv, job_spec
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.groups import sound
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.owner.jobs.job_retention import JobRetention, spacing
from manager_service.owner.jobs.journal import Journal
from manager_service.owner.jobs.open_trajectories import OpenTrajectories
from manager_service.records.job_records import EvalTally, JobError, JobState, Training, newest_stored
from manager_service.records.sample_records import LIMITS

CELL = Cell("tiny")


def outcome(start: Start, sample: int) -> float | Failure:
    """A pure function of what is sampled, as in deterministic mode: some fail, some groups are all equal."""
    draw = random.Random(f"{start.group}/{sample}/{start.adapter.version}").random()
    if draw < 0.15:
        return Failure("grader", "it raised")
    return 1.0 if start.group % 5 == 0 else float(draw > 0.5)


@dataclass
class World:
    """Everything between the owner's decisions: workers, delivery, and what Redis counts."""

    rng: random.Random
    job: Job
    on_its_way: list[Any] = field(default_factory=list)
    ledger: Counter[str] = field(default_factory=Counter)
    open: set[str] = field(default_factory=set)
    steps: list[TrainStep] = field(default_factory=list)
    entries: int = 0
    pauses: int = 0
    now: float = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict[str, float | None])  # of every step
    loses: bool = False  # all that is under way, now and then
    stored: set[int] = field(default_factory=lambda: {0})  # versions

    def started(self) -> Self:
        changes = Changes()
        self.job.queue(0, changes)
        self.job.start(0, changes)
        self.apply(changes)
        return self

    def ended(self) -> Self:
        for _ in range(3000):
            self.turn()
            if self.job.settled:
                return self
        raise AssertionError(f"not done: {self.job.state}")

    def apply(self, changes: Changes) -> None:
        for (_, name), amount in changes.ledger.items():
            self.ledger[name] += amount
        self.open |= set(changes.opened.get(CELL.open(self.job.id), {}))
        self.open -= changes.closed.get(CELL.open(self.job.id), set())
        for stream, message in changes.published:
            if stream in (CELL.env, CELL.train, CELL.rollout_first):
                self.on_its_way += self.work(message)
        settled = sum(self.ledger[n] for n in ("trained", "filtered", "stale", "failed", "cancelled"))
        assert self.ledger["issued"] == settled + len(self.open), "I7"

    def work(self, message: Any) -> list[Any]:
        """The workers' answers to a message; some of them come twice."""
        env = StandInEnv(CELL, outcome)
        if isinstance(message, Forget):
            self.stored -= set(message.versions)
            return [Forgotten(id=f"{message.id}/done", **message.about(), forget=message.id)]
        if isinstance(message, Start):
            assert message.adapter.version in self.stored
            results: list[Any] = [env.scored(message, sample) for sample in message.samples]
            if message.purpose == "train" and self.rng.random() < 0.3:  # some come back parked, should there be a pause
                results += [self.parked(message, sample) for sample in message.samples]
        elif isinstance(message, TurnRequest):
            assert message.trajectory_adapter.version in self.stored
            results = [self.finished(message)]
        else:
            results = [self.made(message)]
        return results + [r for r in results if self.rng.random() < 0.1]

    def made(self, message: Init | TrainStep) -> AdapterUpdate:
        if isinstance(message, TrainStep):
            if message.id not in {s.id for s in self.steps}:
                self.steps.append(message)
            assert {message.adapter.version, *map(int, message.rows.versions.numpy())} <= self.stored
            target = message.adapter.next()
        else:
            target = message.adapter
        self.stored.add(target.version)
        return AdapterUpdate(
            id=f"{message.id}/done", **message.about(), adapter=target, batch=message.id, metrics=self.metrics
        )

    def parked(self, start: Start, sample: int) -> Parked:
        """A later turn of the job's model, or one of a grader's model."""
        ref, judged = TrajectoryRef("train", start.seed, start.group, sample, start.attempt), sample == 1
        request = TurnRequest(
            id=turn_id(start.job, ref, start.adapter.version, 1),
            **start.about(),
            adapter=BASE if judged else start.adapter,
            judges=start.adapter if judged else None,
            trajectory=ref,
            turn=1,
            transcript=shown([1]),
            sampling=Sampling(),
        )
        return Parked(id=request.id, **start.about(), request=request)

    def finished(self, request: TurnRequest) -> ScoredTrajectory:
        """A parked turn that went on gives what it would have given without the pause."""
        ref = request.trajectory
        start = Start(
            id="x",
            **request.about(),
            adapter=request.trajectory_adapter,
            purpose="train",
            seed=ref.seed,
            group=ref.group,
            samples=(ref.sample,),
            attempt=ref.attempt,
            item=None,
            env=self.job.spec.env,
            sampling=request.sampling,
        )
        return StandInEnv(CELL, outcome).scored(start, ref.sample)

    def deliver(self, message: Any, changes: Changes) -> None:
        self.entries += 1
        if isinstance(message, AdapterUpdate):
            self.job.on_adapter(message, self.now, changes)
        elif isinstance(message, Forgotten):
            self.job.retention.forgotten(message.forget, changes)
        elif isinstance(message, Parked):
            if self.job.state.status == "paused":
                self.job.on_parked(f"{self.entries}-0", message, changes)
        else:
            self.job.on_scored(f"{self.entries}-0", message, changes)

    def turn(self) -> None:
        """One thing happens."""
        self.now += 1
        changes, job = Changes(), self.job
        dice = self.rng.random()
        if dice < 0.02 and self.pauses < 3:
            self.pauses += job.state.status == "running"
            job.pause(self.now, changes)
        elif dice < 0.3 and job.state.status == "paused":
            job.resume(self.now, changes)
        elif dice < 0.05 and self.loses and job.state.status == "running":
            self.on_its_way.clear()
            job.resend(self.now, changes)
            if job.retention.under_way:
                job.retention.ask(self.now, changes)
        elif dice < 0.4:
            job.retention.look(({}, {}), self.now, changes)
        elif dice < 0.6 and job.wants_group():
            job.issue_group(changes)
        elif self.on_its_way:
            late = self.rng.randrange(len(self.on_its_way))
            self.deliver(self.on_its_way.pop(late), changes)
        job.advance(self.now, changes)
        if (numbers := job.next_batch()) is not None and self.rng.random() < 0.7:
            job.publish_step(numbers, changes)
        self.apply(changes)


def run(seed: int, *, loses: bool = False, **hyper: Any) -> World:
    small: dict[str, Any] = {"num_steps": 4, "batch_size": 3, "group_size": 4}
    spec = job_spec(**small | hyper)
    return World(random.Random(seed), Job(CELL, spec, JobState(), Items(), Items()), loses=loses).started().ended()


def trained(world: World) -> list[Any]:
    """The results that each step was made from, whoever was fast."""
    steps = {step.adapter.version: step for step in world.steps}
    return [msgspec.msgpack.encode((v, steps[v].rows, steps[v].next_group)) for v in sorted(steps)]


@settings(max_examples=12)
@given(st.integers(0, 10**9), st.booleans())
def test_what_a_job_trains_on_does_not_depend_on_order_delays_repeats_or_pauses(seed: int, dynamic: bool) -> None:
    assert trained(run(seed, dynamic_sampling=dynamic)) == trained(run(0, dynamic_sampling=dynamic))


@settings(max_examples=24)
@given(st.integers(0, 10**9), st.integers(0, 3), st.booleans())
def test_every_trajectory_is_accounted_for_and_none_is_too_old(seed: int, staleness: int, dynamic: bool) -> None:
    world = run(seed, loses=True, max_staleness=staleness, dynamic_sampling=dynamic, num_steps=8)
    assert world.job.state.status == "succeeded"
    assert world.open == set()
    for step in world.steps:
        lag = step.adapter.version - step.rows.versions.numpy()
        assert all((lag >= 0) & (lag <= staleness))
    assert {s.adapter.version for s in world.steps} == set(range(8))
    assert not world.ledger["stale"]


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_job_that_ends_early_settles_all_but_a_step_under_way(end: str) -> None:
    for seed in range(20):
        spec = job_spec(num_steps=9, batch_size=3, group_size=4)
        world = World(random.Random(seed), Job(CELL, spec, JobState(), Items(), Items())).started()
        for _ in range(60 + seed):
            world.turn()
        changes = Changes()
        if end == "cancel":
            world.job.cancel(world.now, changes)
        else:
            world.job.fail(JobError("x", "y"), world.now, changes)
        world.apply(changes)
        training = world.job.state.training
        assert world.open == set(training.keys if training else ())
        # A step that Redis then loses is given up
        changes = Changes()
        world.job.resend(world.now, changes)
        world.apply(changes)
        assert world.job.settled and not world.open


def started(**changes: Any) -> tuple[Job, Changes]:
    """A job that was just started."""
    spec = msgspec.structs.replace(job_spec(num_steps=2, batch_size=1, group_size=2), **changes)
    job, changes_of = Job(CELL, spec, JobState(), Items(), Items()), Changes()
    job.queue(0, changes_of)
    job.start(0, changes_of)
    return job, changes_of


def test_a_result_of_an_attempt_that_a_pause_made_void_is_dropped() -> None:
    job, changes = started()
    job.issue_group(changes)
    start = cast(Start, changes.published[-1][1])
    job.pause(1, changes)
    job.resume(2, changes)
    job.on_scored("1-0", StandInEnv(CELL, outcome).scored(start, 0), changes)
    assert job.num_waiting == 2


def test_a_job_of_the_base_model_samples_and_trains_without_waiting_for_its_version_0() -> None:
    job, changes = started()
    assert job.wants_group() and not changes.published and not changes.begun
    job.issue_group(changes)
    ((_, start),) = changes.published
    assert isinstance(start, Start) and start.untrained and start.adapter.version == 0
    assert changes.begun == [job.id], "workers of other bits are kept away"
    assert newest_stored(job.spec, job.state) == -1, "nobody has its files"
    world = run(0)
    assert [step.untrained for step in world.steps] == [True, False, False, False]
    assert newest_stored(world.job.spec, world.job.state) == 4


@pytest.mark.parametrize("start", [{"source": AdapterRef("t", "other", 3)}, {"adapter_file": "file-1"}])
def test_a_job_that_starts_from_an_adapter_waits_for_its_copy(start: dict[str, Any]) -> None:
    job, changes = started(**start)
    ((_, init),) = changes.published
    assert isinstance(init, Init) and not job.wants_group()
    update = AdapterUpdate(id="x", **init.about(), adapter=init.adapter, batch=init.id)
    job.on_adapter(update, 1.0, changes)
    assert job.wants_group() and newest_stored(job.spec, job.state) == 0
    job.issue_group(changes)
    message = changes.published[-1][1]
    assert isinstance(message, Start) and not message.untrained


@pytest.mark.parametrize("name", ["sampling_gap", "lagged_gap"])
def test_a_sampling_gap_beyond_its_bound_is_warned_of_once_and_truncates_every_later_step(name: str) -> None:
    spec = job_spec(num_steps=3, batch_size=1, group_size=2)
    job = Job(CELL, spec, JobState(status="running", version=1), Items(), Items())
    changes = Changes()
    for gap in (None, 0.0009, 0.02, 0.03, 0.0001):
        job.state.gaps = {} if gap is None else {"sampling_gap": 0.0, name: gap}
        before = job.orders.step(job.state, [], 1).loss.truncate_ratios
        job.journal.check_sampling_gap(1.0, 0.001, changes)
        after = job.orders.step(job.state, [], 1).loss.truncate_ratios
        assert after == (before or (gap or 0) > 0.001)
    assert after
    ((_, event),) = changes.events
    assert (
        event.level == "warn" and f"{name} 0.0200 is beyond 0.001" in event.message and "is_clip = 2" in event.message
    )


@settings(max_examples=12)
@given(st.integers(0, 10**9), st.integers(0, 3), st.integers(2, 4))
def test_a_version_is_deleted_only_when_nobody_needs_it(seed: int, staleness: int, keep: int) -> None:
    """The world of these tests has no store: a set of versions stands for it. Whoever needs one that is not there fails."""
    world = run(seed, loses=seed % 2 == 0, max_staleness=staleness, keep_versions=keep, num_steps=9)
    n = spacing(9, keep)
    assert world.stored == {0, 8, 9, *range(n, 10, n)} == set(world.job.retention.versions)


@pytest.mark.parametrize(
    ("newest", "keep", "n"),
    [(64, 64, 1), (65, 64, 2), (129, 64, 2), (130, 64, 4), (1000, 64, 16), (7, 2, 4), (0, 2, 1)],
)
def test_the_versions_that_a_job_keeps_are_evenly_spaced(newest: int, keep: int, n: int) -> None:
    assert spacing(newest, keep) == n and len(range(n, newest + 1, n)) <= keep


def test_the_best_version_by_evaluation_stays_and_those_that_are_trained_on_or_evaluated() -> None:
    spec = job_spec(num_steps=20, keep_versions=2)
    state = JobState(status="running", version=11, best_version=2, evals={"5": EvalTally(units=1)})
    state.training = Training("b", (), 0, (9,))
    keeping = JobRetention(CELL, spec, state, OpenTrajectories(CELL, spec))
    for version in range(12):
        keeping.reached(version, Changes())
    keeping.look(({3: False}, {7: False}), 0.0, changes := Changes())  # a copy, and a use
    assert sorted(keeping.versions) == [0, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert [version for version, whole in keeping.versions.items() if whole] == [10, 11]
    assert changes.closed == {CELL.versions(spec.id): {"1", "6"}}, "what is marked is not listed"


def test_what_is_used_when_its_job_ends_stays() -> None:
    spec = job_spec(num_steps=7, keep_versions=2)
    keeping = JobRetention(CELL, spec, JobState(version=7), OpenTrajectories(CELL, spec))
    for version in range(8):
        keeping.reached(version, Changes())
    keeping.state.status = "succeeded"
    assert not keeping.is_tidy
    keeping.look(({}, {3: False}), 0.0, Changes())
    keeping.look(({}, {3: False, 1: False}), 0.0, changes := Changes())
    [(_, message)] = changes.published
    assert isinstance(message, Forget) and message.versions == (2, 5)
    keeping.forgotten(message.id, changes := Changes())
    assert changes.closed == {CELL.checkpoints(spec.id): {"2", "5"}} and not keeping.is_tidy
    keeping.look(({}, {1: False, 3: False}), 0.0, Changes())
    assert keeping.is_tidy and sorted(keeping.versions) == [0, 1, 3, 4, 6, 7]


def begun(**hyper: Any) -> World:
    """A job whose first groups are issued."""
    small: dict[str, Any] = {"num_steps": 2, "batch_size": 2, "group_size": 4}
    spec = job_spec(**small | hyper)
    world = World(random.Random(0), Job(CELL, spec, JobState(status="running", version=0), Items(), Items()))
    changes = Changes()
    while world.job.wants_group():
        world.job.issue_group(changes)
    world.apply(changes)
    return world


def letter(identity: str, stream: str) -> DeadLetter:
    about: Any = {"tenant": "", "job": "j", "partition": 0}
    return DeadLetter(id=identity, **about, stream=stream, entry="1-0", reason="newer", deliveries=1, payload=b"")


def test_a_turn_that_nobody_can_read_has_failed_and_a_start_with_all_its_trajectories() -> None:
    world = begun()
    job, changes = world.job, Changes()
    job.on_dead_letter("1-0", letter(f"{job.id}/0/2/1/0", CELL.env), 1.0, changes)
    job.on_dead_letter("2-0", letter(f"{job.id}/1/0/0", CELL.env), 1.0, changes)
    job.on_dead_letter("3-0", letter(f"{job.id}/0/3/0/7", CELL.env), 1.0, changes)  # of another attempt
    world.apply(changes)
    assert {n: sorted(group.waiting) for n, group in job.open.groups.items()} == {0: [0, 1, 3], 1: []}
    assert world.ledger["failed"] == 5
    assert job.state.reasons == {"dead_letter: a message could not be read: newer": 5}


def test_a_step_that_nobody_can_read_fails_its_job() -> None:
    world = begun()
    job = world.job
    job.state.training = Training("j/step1/0", ("7/0",), 0, (0,))
    job.on_dead_letter("1-0", letter("j/step1/0", CELL.train), 1.0, Changes())
    assert job.state.status == "failed" and job.state.error is not None
    assert job.state.error.code == "dead_letter" and "newer" in job.state.error.message


def test_an_update_that_comes_again_does_not_end_the_next_step() -> None:
    world = begun()
    job = world.job
    job.state.version, job.state.training = 1, Training("j/step2/0", ("7/0",), 0, (1,))
    step = msgspec.structs.replace(job.orders.step(job.state, [], 1), adapter=AdapterRef("t", job.id, 0))
    job.on_adapter(world.made(step), 1.0, Changes())
    assert job.state.version == 1 and job.state.training is not None


@pytest.mark.parametrize("num_failed,level", [(0, "info"), (3, "warn")])
def test_a_step_says_what_share_of_its_trajectories_failed_and_why(num_failed: int, level: str) -> None:
    # Given a step of two groups of which some trajectories failed
    world = begun()
    job, starts = world.job, [message for message in world.on_its_way if isinstance(message, ScoredTrajectory)]
    for number, result in enumerate({m.id: m for m in starts}.values()):
        failure = Failure("environment", "a user's message") if number < num_failed else None
        reward = None if failure else float(number % 2)
        world.deliver(msgspec.structs.replace(result, failure=failure, reward=reward), Changes())
    changes = Changes()
    job.publish_step(job.next_batch() or [], changes)
    (step,) = [message for _, message in changes.published if isinstance(message, TrainStep)]
    # When it has been trained
    changes = Changes()
    job.on_adapter(world.made(step), 5.0, changes)
    # Then its event says so
    (event,) = [event for _, event in changes.events if event.type == "metrics"]
    assert event.data["failed_share"] == num_failed / 8 and event.level == level
    assert event.data["failed_reason"] == ("environment: a user's message" if num_failed else None)
    assert ("of its trajectories failed, most of them: environment" in event.message) == bool(num_failed)


@pytest.mark.parametrize(("num_failed", "level"), [(1, "info"), (2, "warn")])
def test_an_evaluation_of_which_too_much_failed_is_a_warning_with_a_reason(num_failed: int, level: str) -> None:
    journal, changes = Journal(job_spec(), JobState(status="running", version=0), LIMITS), Changes()
    tally = EvalTally(units=20, settled=20, num=20 - num_failed, failed=num_failed, failed_reason="grader: it raised")
    journal.evaluated(3, tally, 1.0, changes)
    ((_, event),) = changes.events
    assert event.level == level
    assert event.message.endswith("; 10% of it failed, the first of them: grader: it raised") == (level == "warn")


GOOD: dict[str, float | None] = {"num_signal_rows": 8.0, "advantage_std": 0.9, "ess_share": 0.9, "sampling_kl": 0.01}
EQUAL: dict[str, float | None] = {"num_signal_rows": 0.0, "advantage_std": 0.0, "reward_mean": 0.0}


def told(*steps: dict[str, float | None]) -> list[tuple[int, str]]:
    """The warnings of a job whose steps have these metrics, and its last event: each with the version after which it came."""
    state = JobState(status="running", version=0)
    journal, found = Journal(job_spec(num_steps=len(steps)), state, LIMITS), list[tuple[int, str]]()
    for metrics in steps:
        state.version, changes = state.version + 1, Changes()
        adapter = AdapterRef("t", "j", state.version)
        update = AdapterUpdate(id="u", tenant="t", job="j", partition=0, adapter=adapter, batch="b", metrics=metrics)
        journal.trained(update, Training("b", (), 0, (0,)), 1.0, changes)
        if state.version == len(steps):
            journal.completed(2.0, changes)
        found += [(state.version, event.message) for _, event in changes.events if event.type == "message"]
    return found


@pytest.mark.parametrize(
    ("nothing", "why"),
    [
        (EQUAL, r"no group's rewards differ \(their mean is 0.00\)\. Read the samples\."),
        (EQUAL | {"num_signal_rows": 8.0}, "no group's rewards differ"),  # of a job with a KL term
        ({"no_signal": 1.0}, "no group's rewards differ. Read the samples"),  # dynamic sampling has dropped them
        (EQUAL | {"truncated_share": 0.9}, r"max_tokens \(90% of the answers were cut off\)"),
        (EQUAL | {"advantage_std": 0.5}, "mask_truncated leaves out all answers whose rewards differ"),
    ],
)
def test_steps_that_learn_nothing_are_warned_of_and_a_job_of_such_steps_says_so_at_its_end(
    nothing: dict[str, float | None], why: str
) -> None:
    (_, first), *others, (version, last) = told(nothing, nothing, nothing)
    assert re.search(f"^For 2 steps nothing was learned: .*{why}", first) and not others
    assert version == 3 and "completed, but nothing was learned: in none of its 3 steps" in last
    assert told(nothing, GOOD, nothing) == [(3, "The job has successfully completed")]


@pytest.mark.parametrize(
    ("far", "why"),
    [({"ess_share": 0.29}, "ess_share 0.29 is below 0.3"), ({"sampling_kl": 0.11}, "sampling_kl 0.11 is above 0.1")],
)
def test_two_steps_far_from_the_policy_that_sampled_are_warned_of_at_most_once_in_ten(
    far: dict[str, float | None], why: str
) -> None:
    stale = GOOD | far | {"staleness": 1.0}
    *warnings, _ = told(GOOD, stale, GOOD, *[stale] * 14)
    assert [version for version, _ in warnings] == [5, 15]
    assert all(f"({why}): lower max_staleness" in message for _, message in warnings)


# ---- a new owner ----------------------------------------------------------------------------------------------------


def taken_over(*uncounted: int) -> tuple[Job, list[ScoredTrajectory]]:
    """A job whose last owner had counted all results of its only group but these, as the next owner loads it; the results."""
    job, changes = running_job(), Changes()
    job.issue_group(changes)
    start = next(message for _, message in changes.published if isinstance(message, Start))
    results = [StandInEnv(CELL).scored(start, sample) for sample in start.samples]
    for sample, result in enumerate(results):
        if sample not in uncounted:
            job.on_scored(f"{sample}-0", result, changes)
    kept = {name.encode(): value.encode() for name, value in changes.opened[CELL.open(job.id)].items()}
    following = Job(CELL, job.spec, job.state, Items(), Items())
    following.open.load(job.state, kept, {})
    return following, results


def running_job() -> Job:
    state = JobState(status="running", version=0)
    return Job(CELL, job_spec(batch_size=1, group_size=4, num_steps=1), state, Items(), Items())


def test_counted_results_are_taken_back_whatever_the_new_owner_reads_before_them() -> None:
    job, results = taken_over(0)
    changes = Changes()
    assert not job.open.restore("0-0", results[0])
    job.on_scored("0-0", results[0], changes)
    job.advance(1.0, changes)
    assert [job.open.restore(f"{sample}-0", results[sample]) for sample in (1, 2, 3)] == [True] * 3
    job.open.expect_counted()
    assert len(job.open.groups[0].scored) == 4 and job.next_batch() == [0]
    assert not changes.ledger


def test_samples_have_the_advantage_by_which_they_are_learned_from() -> None:
    job, changes = running_job(), Changes()
    job.issue_group(changes)
    start = next(message for _, message in changes.published if isinstance(message, Start))
    for sample in start.samples:
        result = StandInEnv(CELL).scored(start, sample)
        job.on_scored(f"{sample}-0", msgspec.structs.replace(result, reward=float(sample)), changes)
    job.publish_step(job.next_batch() or [], changes)
    (kept,) = changes.samples
    assert [one["advantage"] for one in json.loads(kept.records)] == [-1.162, -0.387, 0.387, 1.162]


def test_a_job_that_is_cancelled_before_its_counted_results_are_read_settles_them() -> None:
    job, results = taken_over(0)
    changes = Changes()
    job.cancel(1.0, changes)
    assert changes.ledger[job.id, "cancelled"] == 4
    assert not any(job.open.restore(f"{sample}-0", result) for sample, result in enumerate(results))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_log_prob_that_is_no_finite_number_fails_its_trajectory(score: float) -> None:
    _, (result, *_) = taken_over()
    broken = msgspec.structs.replace(result, transcript=shown([1]) + wrote([2, 3, 4], [-0.5, score, -1.0]))
    assert sound(result) is result
    failure = sound(broken).failure
    assert failure is not None and failure.kind == "grader" and sound(broken).reward is None
