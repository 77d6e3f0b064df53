"""The simulator: deterministic, conserving, and with the policies in their known order."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire.messages import LoraSpec, LossSpec, OptimSpec, WorkerReport
from manager_service.records.job_records import Hyper
from manager_service.scheduling.policies import POLICIES, parse_policy
from simulator.__main__ import options
from simulator.calibration import Calibration, LogNormal, Machine, PolicyRun, Size, Workload
from simulator.fit import Recording, calibrate, read_recording
from simulator.world import World, simulate

MACHINE = Machine(
    decode_step_s=0.004,
    decode_row_s=0.00004,
    prefill_token_s=0.00002,
    train_step_s=0.01,
    train_token_s=0.0001,
    commit_s=0.005,
    load_s=0.002,
    grade_s=0.001,
    hop_s=0.004,
    start_s=0.0005,
    engine_loop_s=0.0001,
    env_loop_s=0.0001,
    trainer_loop_s=0.002,
    control_s=0.0001,
    cores=2,
)
SINGLE = Workload(name="single", batch_size=4, group_size=4, num_steps=3, turn_tokens=LogNormal.of(20, 0.3))
AGENTIC = msgspec.structs.replace(
    SINGLE, name="agentic", turn_tokens=LogNormal.of(12, 0.3), tool_s=LogNormal.of(0.5, 0.5), min_calls=2, max_calls=4
)
TAIL = msgspec.structs.replace(SINGLE, name="tail", turn_tokens=LogNormal.of(12, 0.99), max_tokens=400)


def run(workload: Workload, policy: str, num_jobs: int, *, size: Size | None = None) -> tuple[World, PolicyRun]:
    calibration = Calibration(machine=MACHINE, workload=workload, size=size or Size())
    world = simulate(calibration, policy=parse_policy(policy), num_jobs=num_jobs)
    return world, world.figures(workload.name)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_are_the_same_to_the_last_digit(policy: str) -> None:
    assert run(AGENTIC, policy, 4)[1] == run(AGENTIC, policy, 4)[1]


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from(list(POLICIES)),
    st.integers(1, 6),
    st.sampled_from([SINGLE, AGENTIC, TAIL]),
    st.builds(
        Size,
        rollout=st.integers(1, 3),
        trainer=st.integers(1, 2),
        rollout_slots=st.integers(2, 64),
        env_slots=st.integers(1, 64),
        own_streams=st.booleans(),
        lora_slots=st.sampled_from([0, 2]),
        kills_s=st.sampled_from([(), (0.3, 0.6)]),
        start_s=st.just(0.2),
        lease_s=st.just(0.4),
        least_rollout=st.integers(0, 1),
        repack=st.booleans(),
        adapter_bytes=st.sampled_from([0.0, 1e6]),
        relay=st.booleans(),
    ),
)
def test_every_trajectory_that_is_issued_is_trained_whoever_decides(
    policy: str, num_jobs: int, workload: Workload, size: Size
) -> None:
    calibration = Calibration(machine=MACHINE, workload=workload, size=size)
    world = simulate(calibration, policy=parse_policy(policy), num_jobs=num_jobs)
    expected = num_jobs * workload.num_steps * workload.batch_size * workload.group_size
    assert world.issued == world.settled == expected
    found = world.figures(workload.name)
    assert 0 < found.rollout_busy <= 1 and 0 < found.trainer_busy <= 1
    assert found.steps == workload.num_steps and found.n == num_jobs


def test_what_a_job_samples_does_not_depend_on_policy_or_company() -> None:
    tokens = {run(AGENTIC, policy, num)[0].progress["job-00000"].tokens for policy in POLICIES for num in (1, 3)}
    assert len(tokens) == 1


def test_what_a_job_samples_depends_neither_on_deaths_nor_on_workers_that_come_and_go() -> None:
    slow = msgspec.structs.replace(TAIL, turn_tokens=LogNormal.of(100, 1.0))
    moved = Size(
        rollout=3, rollout_slots=16, kills_s=(0.5, 1.0), lease_s=0.5, start_s=0.5, least_rollout=1, repack=True
    )
    assert run(slow, "marlaas", 2, size=moved)[0].progress["job-00000"].tokens == (
        run(slow, "marlaas", 2)[0].progress["job-00000"].tokens
    )


def test_the_policies_come_in_their_known_order() -> None:
    for workload in (SINGLE, AGENTIC):
        found = {policy: run(workload, policy, 8)[1] for policy in ("sequential", "synchronous", "marlaas")}
        makespans = [found[policy].makespan_s for policy in ("sequential", "synchronous", "marlaas")]
        assert makespans == sorted(makespans, reverse=True) and makespans[0] > 1.5 * makespans[2], workload.name
        assert found["sequential"].ttfs_s.mean > 5 * found["marlaas"].ttfs_s.mean
        assert found["marlaas"].jain > 0.95


def test_tools_that_hold_slots_cost_time_where_slots_are_few() -> None:
    few = Size(rollout_slots=16)
    naive, marlaas = (run(AGENTIC, policy, 8, size=few)[1] for policy in ("naive", "marlaas"))
    assert naive.makespan_s > 1.3 * marlaas.makespan_s
    assert naive.rollout_busy < marlaas.rollout_busy


def test_alone_under_sequential_a_jobs_time_is_the_sum_of_its_parts() -> None:
    """One trajectory a group would not train; two rows, one turn, constant lengths: everything can be counted by hand."""
    workload = Workload(
        batch_size=1, group_size=2, num_steps=1, turn_tokens=LogNormal.of(10, 0.0), prefill_tokens=0, prompt_tokens=5
    )
    machine = msgspec.structs.replace(MACHINE, cores=None)
    world = simulate(Calibration(machine=machine, workload=workload), policy=parse_policy("sequential"), num_jobs=1)
    hops = 1 + 2 + 4 + 2  # the owner; Start, turns; result, score, batch, step; its answer
    decode_s = 10 * (machine.decode_step_s + 2 * machine.decode_row_s)
    train_s = machine.train_step_s + 30 * machine.train_token_s + 2 * machine.commit_s + machine.trainer_loop_s
    loops_s = 2 * (machine.engine_loop_s + machine.env_loop_s + machine.control_s)
    parts = machine.start_s + decode_s + loops_s + machine.grade_s + train_s
    makespan_s = world.figures("one").makespan_s
    assert parts + (hops - 3) * machine.hop_s <= makespan_s <= parts + (hops + 1) * machine.hop_s


# ---- calibration ----------------------------------------------------------------------------------------------------


ABOUT: dict[str, Any] = {
    **{"tenant": "", "job": "", "partition": 0, "base_model": "tiny"},
    **{"pid": 1, "host": "h", "state": "busy", "slots": 8},
}


def reports(service: str, growth: list[dict[str, float]]) -> list[WorkerReport]:
    """One worker's reports whose counters grow so."""
    counters: dict[str, float] = {}
    found: list[WorkerReport] = []
    for each in [{}, *growth]:
        counters = {name: counters.get(name, 0.0) + each.get(name, 0.0) for name in {**counters, **each}}
        busy = 0.5 if "settled" in each else 0.0
        found.append(WorkerReport(id=f"{service}-1", service=service, busy=busy, **ABOUT, counters=counters))
    return found


def test_a_recording_becomes_a_calibration() -> None:
    rollout = {
        "decode_steps": 100, "sampled_tokens": 800, "decode_s": 0.4, "prefill_tokens": 500, "prefill_s": 0.1,
        "settled": 40, "settle_s": 0.04, "busy_s": 1.0, "turns": 40, "sum_log_turn_tokens": 120.0, "sum_squared_log_turn_tokens": 370.0,
        "cpu_s": 0.6, "loads": 2, "load_s": 0.06,
    }  # fmt: skip
    env = {
        "tool_turns": 30, "sum_log_tool_s": -21.0, "sum_squared_log_tool_s": 22.2, "graded": 10, "grade_s": 0.02, "sum_squared_calls": 90,
        "cpu_s": 0.1, "delivered": 50, "delivery_s": 0.15, "settled": 42, "starts": 2, "start_s": 0.01,
    }  # fmt: skip
    trainer = {
        "settled": 2, "trained_tokens": 1200, "busy_s": 0.6, "compute_s": 0.3, "commit_s": 0.24, "cpu_s": 0.4,
    }  # fmt: skip
    idle = [{"cpu_s": 0.05}]
    told = [
        *reports("rollout", [rollout] * 3 + idle),
        *reports("env", [env] * 3 + idle),
        *reports("trainer", [trainer] * 3 + idle),
    ]
    hyper = Hyper(num_steps=2, batch_size=1, group_size=5, lora=LoraSpec(), loss=LossSpec(), optim=OptimSpec(1e-3))
    found = calibrate(Recording(told, hyper), cores=2, control_s=1e-4)
    machine, workload = found.machine, found.workload
    assert (machine.decode_step_s + 8 * machine.decode_row_s, machine.prefill_token_s) == pytest.approx((0.004, 0.0002))
    assert (machine.hop_s, machine.grade_s, machine.load_s, machine.start_s) == pytest.approx(
        (0.004, 0.002, 0.03, 0.005)
    )
    assert (machine.engine_loop_s, machine.env_loop_s) == pytest.approx((0.1 / 40, 0.09 / 40)), (
        "idle loops are left out"
    )
    assert (machine.trainer_loop_s, machine.commit_s) == pytest.approx((0.05, 0.12 - 0.05))
    assert machine.control_s == 1e-4
    assert workload.tool_s is not None and workload.tool_s.mu == pytest.approx(-0.7)
    assert (workload.min_calls, workload.max_calls) == (3, 3)
    assert (workload.turn_tokens.mu, workload.prompt_tokens) == pytest.approx((3.0, 120 - 80))
    assert (found.size.rollout_slots, found.size.trainer) == (8, 1)
    by_the_clock = calibrate(Recording(told, hyper), cores=None, control_s=1e-4).machine
    assert by_the_clock.prefill_token_s == pytest.approx(2 * machine.prefill_token_s), "it waited for half of the time"
    assert simulate(found, policy=parse_policy("marlaas"), num_jobs=2).settled == 20


def test_a_run_in_which_nothing_happened_is_refused() -> None:
    hyper = Hyper(num_steps=2, lora=LoraSpec(), loss=LossSpec(), optim=OptimSpec(1e-3))
    with pytest.raises(ValueError, match="no rollout worker did anything"):
        calibrate(Recording(reports("rollout", []), hyper), cores=2, control_s=0.0)


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# no telemetry")
    with pytest.raises(ValueError, match=r"README\.md is no telemetry recording"):
        read_recording(tmp_path / "README.md")


@pytest.mark.parametrize(
    "option",
    ["--n=x", "--n=0", "--n=-3", "--n=1,", "--rollout=-1", "--steps=0", "--tenants=0", "--set=x=1", "--with=relay=x"],
)
def test_wrong_numbers_are_refused_in_a_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options().parse_args(["--calibration", "c.json", option])
    assert f"argument {option.split('=')[0]}: " in capsys.readouterr().err
