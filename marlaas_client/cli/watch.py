"""`watch`: jobs and workers, live."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.live import Live

from marlaas_client.cli.options import Data, Json, Url, connect, connect_operator
from marlaas_client.cli.output import console, print_json, say
from marlaas_client.cli.progress import JobProgress
from marlaas_client.cli.view import live_view, plain_line, warning_line
from marlaas_client.client import JOBS, Client
from marlaas_client.errors import JobFailed
from marlaas_client.records import FINAL, Record

PERIOD_S = 1.0
PLAIN_PERIOD_S = 5.0
MAX_FINISHED = 5
"""The number of ended jobs that are shown beside those that run."""


def watch(
    job: Annotated[list[str] | None, typer.Argument(help="Ids. Default: all that run, and the newest others.")] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Show jobs, and to operators the workers, live until all of the jobs have ended. Fails if one of them failed."""
    with connect(url, data) as client, connect_operator(url, data) as operator:
        ids = job or unfinished(client)
        if not ids and not as_json:
            say("No jobs yet: marlaas submit --help")
        watch_jobs(client, ids, operator=operator, as_json=as_json)


def watch_jobs(client: Client, ids: list[str], *, operator: Client | None = None, as_json: bool = False) -> None:
    """Returns when all have ended. `operator`: shows the workers too. Raises JobFailed if one failed."""
    jobs = [Watched(client, job) for job in ids]
    try:
        if as_json:
            _print_events(jobs)
        elif console.is_terminal:
            _show_live(jobs, operator)
        else:
            _print_lines(jobs)
    except KeyboardInterrupt:
        for job in (job.progress.job for job in jobs if not job.progress.has_ended):
            say(f"{job} goes on; to end it: marlaas cancel {job}", err=True)
        raise
    failed = [job.progress for job in jobs if job.progress.status == "failed"]
    if failed:
        raise JobFailed("; ".join(f"{job.job} failed: {job.error}" for job in failed))


class Watched:
    """A job and its events so far."""

    def __init__(self, client: Client, job: str) -> None:
        self.progress = JobProgress(job)
        self._client = client
        self._newest: str | None = None

    def poll(self) -> list[Record]:
        """Reads the new events. Returns them oldest first."""
        record = self._client.get(f"{JOBS}/{self.progress.job}")  # before the events, so that none is missed at the end
        events = list(self._new_events())[::-1]
        self._newest = events[-1]["id"] if events else self._newest
        for event in events:
            self.progress.add(event, now=time.monotonic())
        self.progress.update(record)
        return events

    def _new_events(self) -> Iterator[Record]:
        """Newest first."""
        for event in self._client.items(f"{JOBS}/{self.progress.job}/events"):
            if event["id"] == self._newest:
                return
            yield event


def unfinished(client: Client) -> list[str]:
    """Ids of the jobs that have not ended, and of the newest others, oldest first."""
    shown: list[str] = []
    num_finished = 0
    for job in client.items(JOBS):
        num_finished += job["status"] in FINAL
        if job["status"] not in FINAL or num_finished <= MAX_FINISHED:
            shown.append(job["id"])
    return shown[::-1]


def _rounds(jobs: list[Watched], period_s: float) -> Iterator[list[tuple[JobProgress, Record]]]:
    """Asks for all jobs in rounds, and yields each round's new events. Stops after the round in which all jobs had ended."""
    while True:
        yield [(job.progress, event) for job in jobs if not job.progress.has_ended for event in job.poll()]
        if all(job.progress.has_ended for job in jobs):
            return
        time.sleep(period_s)


def _print_events(jobs: list[Watched]) -> None:
    for events in _rounds(jobs, PERIOD_S):
        for _, event in events:
            print_json(event)


def _print_lines(jobs: list[Watched]) -> None:
    for events in _rounds(jobs, PLAIN_PERIOD_S):
        for progress, event in events:
            if event.get("level") == "warn":
                say(warning_line(progress, event))
        for job in jobs:
            say(plain_line(job.progress, time.monotonic()))


def _show_live(jobs: list[Watched], operator: Client | None) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for _ in _rounds(jobs, PERIOD_S):
            workers = operator.get("/v1/cluster/workers")["data"] if operator else []
            live.update(live_view([job.progress for job in jobs], workers, time.monotonic()), refresh=True)
