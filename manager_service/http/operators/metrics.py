"""GET /metrics: Prometheus' text format. Needs the admin key."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from redis.exceptions import ResponseError
from starlette.responses import Response

from common.bus.streams import GROUP_MANAGER, NUM_PARTITIONS
from common.wire.messages import WorkerReport
from manager_service.http.context import Admin, Base, Parts
from manager_service.http.errors import COMMON
from manager_service.records.cluster import own_streams
from manager_service.records.job_records import JobState

router = APIRouter(tags=["health"], responses=COMMON)

MetricSample = tuple[list[str], float]
READ_AHEAD = 500


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format"}},
)
async def metrics(api: Parts, admin: Admin) -> Response:
    """Open work and its age, dead letters, workers, jobs."""
    families: list[Metric] = []
    for base in api.bases.values():
        families += [*await _streams(base), *await _counted(base), *_workers(base), await _jobs(base)]
    registry = CollectorRegistry()
    registry.register(_Collected(_joined(families)))
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


class _Collected:
    """A collector, as prometheus_client calls it."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _joined(families: list[Metric]) -> list[Metric]:
    """Joins the families of all base models, so that each name has one."""
    by_name: dict[str, Metric] = {}
    for family in families:
        by_name.setdefault(family.name, family)
        if by_name[family.name] is not family:
            by_name[family.name].samples += family.samples
    return list(by_name.values())


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[MetricSample]) -> Metric:
    family = GaugeMetricFamily(f"marlaas_{name}", text, labels=labels)
    for values, amount in samples:
        family.add_metric(values, amount)
    return family


# ---- streams --------------------------------------------------------------------------------------------------------


async def _work_streams(base: Base) -> list[tuple[str, str]]:
    cell = base.cell
    inboxes = [(stream, GROUP_MANAGER) for number in range(NUM_PARTITIONS) for stream in cell.inboxes(number)]
    return [*cell.work, *await own_streams(base.redis, cell), *inboxes]


async def _streams(base: Base) -> list[Metric]:
    seconds, micros = await base.redis.time()
    now_s = seconds + micros / 1e6
    rows = [(stream, *await _stream(base, stream, group, now_s)) for stream, group in await _work_streams(base)]
    labels, prefix = ["base_model", "stream"], base.cell.key("")

    def samples(column: int) -> list[MetricSample]:
        return [([base.name, str(row[0]).removeprefix(prefix)], float(row[column])) for row in rows]

    dead = float(await base.redis.xlen(base.cell.dead))
    return [
        _gauge("stream_length", "Open work: entries that nobody has settled", labels, samples(1)),
        _gauge("stream_pending", "Entries that a worker holds", labels, samples(2)),
        _gauge("stream_lag", "Entries that no worker has taken yet", labels, samples(3)),
        _gauge("stream_oldest_seconds", "Age of the oldest open entry", labels, samples(4)),
        _gauge("dead_letters", "Messages that no worker could handle", ["base_model"], [([base.name], dead)]),
    ]


async def _stream(base: Base, stream: str, group: str, now_s: float) -> tuple[float, float, float, float]:
    """Length, pending, lag, age of the oldest entry. Redis 6.2 tells no lag: it is the length less pending."""
    length = await base.redis.xlen(stream)
    try:
        pending = (await base.redis.xpending(stream, group))["pending"]
    except ResponseError:  # no such group yet
        pending = 0
    first: Any = await base.redis.xrange(stream, count=1) if length else []
    age_s = now_s - int(first[0][0].split(b"-")[0]) / 1000 if first else 0.0
    return length, pending, max(0, length - pending), max(0.0, age_s)


async def _counted(base: Base) -> list[Metric]:
    labels = ["base_model", "kind"]
    dropped = CounterMetricFamily("marlaas_dropped", "Entries dropped because there were too many bytes", labels=labels)
    for kind, num in (await base.redis.hgetall(base.cell.dropped)).items():
        dropped.add_metric([base.name, kind.decode()], float(num))
    families: list[Metric] = [dropped]
    for name, num in (await base.redis.hgetall(base.cell.scaled)).items():
        text = "Rollout workers: those that retired, and seconds for which some were held"
        families.append(total := CounterMetricFamily(f"marlaas_{name.decode()}", text, labels=labels[:1]))
        total.add_metric([base.name], float(num))
    return families


# ---- workers and jobs -----------------------------------------------------------------------------------------------


def _workers(base: Base) -> list[Metric]:
    workers = base.cluster.workers()
    labels = ["base_model", "service", "worker"]

    def one(worker: WorkerReport) -> list[str]:
        return [base.name, worker.service, worker.id]

    totals = CounterMetricFamily("marlaas_worker_events", "What workers count", labels=[*labels, "name"])
    for worker in workers:
        for name, amount in worker.counters.items():
            totals.add_metric([*one(worker), name], amount)
    counts = Counter((worker.service, worker.state) for worker in workers)
    return [
        _gauge(
            "workers",
            "Live workers",
            ["base_model", "service", "state"],
            (([base.name, *key], float(n)) for key, n in counts.items()),
        ),
        _gauge("worker_busy", "Busy share of the last second", labels, ((one(w), w.busy) for w in workers)),
        _gauge("worker_slots", "How much it can work on", labels, ((one(w), float(w.slots)) for w in workers)),
        _gauge("worker_in_use", "How much it works on", labels, ((one(w), float(w.in_use)) for w in workers)),
        totals,
    ]


async def _jobs(base: Base) -> Metric:
    """Unfinished jobs by status; finished ones together."""
    active = [job.decode() for p in range(NUM_PARTITIONS) for job in await base.redis.smembers(base.cell.active(p))]
    counts: Counter[str] = Counter()
    for start in range(0, len(active), READ_AHEAD):
        pipe = base.redis.pipeline(transaction=False)
        for job in active[start : start + READ_AHEAD]:
            pipe.hget(base.cell.job(job), "state")
        states = [state for state in await pipe.execute() if state is not None]
        counts.update(msgspec.json.decode(state, type=JobState).status for state in states)
    archived = int(await base.redis.get(base.cell.num_archived) or 0)
    counts["finished"] = archived + await base.redis.zcard(base.cell.jobs_all) - len(active)
    samples = (([base.name, status], float(n)) for status, n in counts.items())
    return _gauge("jobs", "Jobs by status", ["base_model", "status"], samples)
