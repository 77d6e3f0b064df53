"""The checks at the end of an act. Each returns what is wrong, in words; nothing wrong: an empty list."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from chaos.cluster import CELL, Cluster, shared_memory
from chaos.tenants import STEPS, Run
from common.store.adapters import PEFT_FILES, Manifest
from harness.live import is_balanced
from harness.s3_server import S3Server
from manager_service.records.keys import GLOBAL

RECORDS = (
    "job:", "ledger:", "events:", "checkpoints:", "usage:", "stored:", "tenant-jobs:", "jobs-all", "idempotency:",
    "finished:", "num-archived", "rev:", "weights", "inference", "served", "owners", "bits", "memory", "dropped", "telemetry", "control",
    "adapters:new", "done", "ends", "env-workers",
    "rollout-workers", "hungry",
)  # fmt: skip
"""Keys of a cell that stay: records of jobs that have ended, counters, broadcasts that are trimmed by age."""
EXPIRING = ("reply:", "peers:", "looked:", "moved:", "use:", "lease:", "train:", "sampling", "hours:", "clients:",
            "session:", "sampler:", "tenant-samplers:")  # fmt: skip
"""Keys that a process which was killed leaves behind, for a time."""
OUTSIDE = ("tenants", "keys", "sessions:", "format", "signing-key", "loggers")
OUTSIDE_EXPIRING = ("session:", "exporter")
"""The same outside of the cell: neither a file nor an upload is among them."""
GONE = -2
"""Redis' answer for the time that a key has left which has expired since the keys were listed."""
LEDGER = ("issued", "trained", "filtered", "stale", "failed", "cancelled", "in_flight")


def ended_well(run: Run) -> list[str]:
    if run.forgotten or run.job["status"] == "succeeded":
        return []
    return [f"{run.recipe.name} {run.id} {run.job['status']}: {run.job['error']}"]


def ledger_balances(job: str, ledger: Mapping[str, int]) -> list[str]:
    """I7, and nothing is in flight any more."""
    counts = {name: ledger[name] for name in LEDGER}
    return [] if is_balanced(counts) and counts["in_flight"] == 0 else [f"{job}: the ledger does not balance: {counts}"]


def trained_once(run: Run, ledger: Mapping[str, int], events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each trajectory of a job that succeeded was trained, and none had to be replaced. The events say why one failed."""
    wanted = {"trained": STEPS * run.recipe.num_trajectories, "failed": 0}
    found = {name: ledger[name] for name in wanted}
    if found == wanted:
        return []
    reasons = {data["failed_reason"] for event in events if (data := event["data"] or {}).get("failed_reason")}
    return [f"{run.recipe.name} {run.id}: {found} instead of {wanted}: {'; '.join(sorted(reasons)) or 'no reason'}"]


def steps_once(job: str, events: Iterable[Mapping[str, Any]]) -> list[str]:
    """A job that succeeded tells of each step once, in order. `events`: newest first."""
    figures = [event["data"] for event in events if event["type"] == "metrics" and "loss" in event["data"]]
    steps = [data["step"] for data in reversed(figures)]
    return [] if steps == list(range(1, STEPS + 1)) else [f"{job}: its events tell of the steps {steps}"]


def manifests(store: S3Server, paths: Iterable[str], tenant: str, job: str) -> list[Manifest]:
    """The manifests of a job, by version."""
    below = f"cell/adapters/{tenant}/{job}/"
    mine = sorted(path for path in paths if path.startswith(below) and path.endswith("/manifest.json"))
    return [msgspec.json.decode(store.get(path), type=Manifest) for path in mine]


def versions_once(job: str, found: list[Manifest], *, trajectories: int) -> list[str]:
    """Versions 0 to the last, each of its own batch, each trajectory in one batch."""
    wrong: list[str] = []
    if [manifest.adapter.version for manifest in found] != list(range(STEPS + 1)):
        wrong.append(f"{job}: versions {[manifest.adapter.version for manifest in found]}")
    if twice := [batch for batch, num in Counter(manifest.batch for manifest in found).items() if num > 1]:
        wrong.append(f"{job}: batches trained twice: {twice}")
    trained = [(manifest.adapter.version, key) for manifest in found for key in manifest.trajectories]
    if twice := [key for key, num in Counter(key for _, key in trained).items() if num > 1]:
        wrong.append(f"{job}: trajectories trained twice: {twice[:5]}")
    uneven = {
        version: num for version, num in Counter(version for version, _ in trained).items() if num != trajectories
    }
    return wrong + ([f"{job}: trajectories by version: {uneven}"] if uneven else [])


def bytes_are_there(store: S3Server, manifest: Manifest) -> list[str]:
    """The files that a manifest names have its sha256."""
    folder = f"cell/{manifest.adapter.path()}/{manifest.attempt}"
    stored = {name: hashlib.sha256(store.get(f"{folder}/{name}")).hexdigest() for name in PEFT_FILES}
    wrong = [name for name, sha256 in stored.items() if manifest.files[name].sha256 != sha256]
    return [f"{manifest.adapter}: other bytes than its manifest says: {wrong}"] if wrong else []


def same_bytes(job: str, found: list[Manifest], reference: list[Manifest]) -> list[str]:
    """Every version has the files of the undisturbed run."""
    differing = [
        mine.adapter.version
        for mine, other in zip(found, reference, strict=False)
        if {name: file.sha256 for name, file in mine.files.items()}
        != {name: file.sha256 for name, file in other.files.items()}
    ]
    return [f"{job}: other bytes than undisturbed from version {differing[0]} on"] if differing else []


# ---- what is left ---------------------------------------------------------------------------------------------------


def left_keys(cluster: Cluster) -> list[str]:
    """Keys that no finished job needs, and streams that hold work."""
    with cluster.redis.client() as client:
        names = {str(name) for name in cast("list[Any]", client.keys("*"))}
        mine = {name: name.removeprefix(CELL.key("")) for name in names if name.startswith(CELL.key(""))}
        streams = [CELL.key(name) for name in mine.values() if is_work(name)]
        wrong = [f"{name} holds {num} entries" for name in streams if (num := client.xlen(name))]
        for key, name in mine.items():
            expires: Any = client.ttl(key)
            passes = expires == GONE or (name.startswith(EXPIRING) and expires >= 0)
            if not (is_work(name) or name.startswith(RECORDS) or passes):
                wrong.append(f"key {name} ({client.type(key)}) is left")
        outside = sorted(names - mine.keys())
        return wrong + [f"key {key} is left" for key in outside if not _may_stay(key, expires=client.ttl(key))]


def _may_stay(key: str, *, expires: Any) -> bool:
    """May a key outside of the cell stay, or has it gone by itself?"""
    name = key.removeprefix(GLOBAL)
    stays = name.startswith(OUTSIDE) or (name.startswith(OUTSIDE_EXPIRING) and expires >= 0)
    return expires == GONE or (name != key and stays)


def is_work(name: str) -> bool:
    """Is it a stream of which every entry is open work, or a dead letter?"""
    inbox = name.startswith(("scored:", "adapters:", "jobs:", "ops:")) and name.rpartition(":")[2].isdigit()
    return inbox or name.startswith(("env:", "rollout:")) or name in ("env", "rollout", "train", "dead")


def runs(cluster: Cluster) -> list[str]:
    """Runs of the Tinker protocol that the service knows. Nobody uses their versions any more."""
    with cluster.redis.client() as client:
        if used := client.keys(CELL.key("use:*")):
            client.delete(*used)
        names: Any = [run for key in client.keys(CELL.tenant_runs("*")) for run in client.zrange(key, 0, -1)]
    return names


def left_memory(cluster: Cluster) -> list[str]:
    """Shared memory outlives the process that made it."""
    return [f"shared memory {name} is left" for name in shared_memory() - cluster.shared_memory]


def left_objects(store: S3Server, forgotten: Iterable[str]) -> list[str]:
    """Call once all files and models have been deleted. Records of finished jobs stay for good. `forgotten`: jobs that a
    replica has never heard of, so that nobody can delete their versions. A process that is killed as it starts leaves the
    object of its probe."""
    known = [path for path in store.paths() if not path.startswith(("cell/probe/", "cell/records/"))]
    return [f"object {path} is left" for path in known if not any(f"/{job}/" in path for job in forgotten)]


def left_files(folder: Path) -> list[str]:
    """Temporary files of processes that have ended."""
    return [f"file {path.relative_to(folder)} is left" for path in (folder / "tmp").iterdir()]
