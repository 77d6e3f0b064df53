"""Predicts each run with the simulator, which is calibrated for each workload on the telemetry of one run."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.paper.results import Measured
from manager_service.scheduling.policies import parse_policy
from simulator.calibration import Calibration, PolicyRun
from simulator.fit import Recording, calibrate, deltas, read_recording, total
from simulator.world import simulate

CALIBRATED_ON = "marlaas"
MOST_JOBS = 8
"""The run that calibrates is the largest up to this, and of no more jobs than run at once: how many rows share a forward
decides what each costs."""

Key = tuple[str, str, int]


def key_of(run: PolicyRun) -> Key:
    return run.workload, run.policy, run.n


def recording_file(folder: Path, run: PolicyRun) -> Path:
    return folder / f"telemetry-{run.workload}-{run.policy}-{run.n}.msgpack"


def calibrates(policy: str, n: int) -> bool:
    """True if a run's telemetry is worth keeping."""
    return policy == CALIBRATED_ON and n <= MOST_JOBS


def calibration_of(recording: Recording, run: Measured, cores: int | None) -> Calibration:
    """Calibration with the processor seconds that manager and Redis used for a turn in the run."""
    turns = total(deltas(recording.reports, "rollout"))["turns"]
    control_s = (run.cpu_s["manager"] + run.cpu_s["redis"]) / max(1.0, turns)
    return calibrate(recording, cores=cores, control_s=control_s, name=run.workload)


def predictions(runs: Iterable[Measured], folder: Path, cores: int | None) -> Mapping[Key, PolicyRun]:
    """Simulated runs of every workload whose telemetry was kept."""
    found: dict[Key, PolicyRun] = {}
    runs = list(runs)
    for workload in dict.fromkeys(run.workload for run in runs):
        own = [run for run in runs if run.workload == workload]
        kept = [run for run in own if recording_file(folder, run).exists()]
        if not kept:
            continue
        calibrations: dict[int, Calibration] = {}
        smallest = min(kept, key=lambda run: run.n)
        for run in own:
            policy = parse_policy(run.policy)
            at_once = 1 if policy.one_job else run.n
            base = max((base for base in kept if base.n <= at_once), key=lambda base: base.n, default=smallest)
            if base.n not in calibrations:
                calibrations[base.n] = calibration_of(read_recording(recording_file(folder, base)), base, cores)
            found[key_of(run)] = simulate(calibrations[base.n], policy=policy, num_jobs=run.n).figures(workload)
    return found
