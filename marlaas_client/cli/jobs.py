"""`jobs, events, logs, cancel, pause, resume`."""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Literal, get_args

import typer

from marlaas_client.cli.options import Data, JobId, Json, Url, connect
from marlaas_client.cli.output import cells, clock, console, cut, print_json, print_table, say, status, table
from marlaas_client.cli.view import event_line
from marlaas_client.client import Client, JobAction
from marlaas_client.records import Event, Job

MAX_REASON = 200
Level = Literal["info", "warn", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels from the least to the most severe."""


def jobs(
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Your jobs, newest first."""
    with connect(url, data) as client:
        records = newest(client, limit)
    if as_json:
        return print_json(records)
    shown = table("job", "status", "model", "created", "tuned model", "error", right=["created"])
    for job in records:
        row = cells(job["model"], clock(job["created_at"]), job["fine_tuned_model"], reason(job))
        shown.add_row(*cells(job["id"]), status(job["status"]), *row)
    print_table(shown)


def events(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The events of a job, oldest first."""
    with connect(url, data) as client:
        for event in _events(client, job, follow):
            if as_json:
                print_json(event)
            else:
                say(event_line(event))


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    level: Annotated[Level, typer.Option(help="The least that is shown.")] = "info",
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The messages of a job, oldest first, each whole; the figures of steps are left to `events`."""
    with connect(url, data) as client:
        for event in _events(client, job, follow):
            severe = LEVELS.index(event["level"]) >= LEVELS.index(level)
            if severe and (event["type"] == "message" or event["level"] != "info"):
                line = f"{clock(event['created_at'])}  {event['level']:<5}  {event['message']}"
                print_json(event) if as_json else say(line)


def _events(client: Client, job: JobId, follow: bool) -> Iterable[Event]:
    """Oldest first."""
    return client.follow(job) if follow else client.events(job)


def cancel(job: JobId, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """End a job; its finished versions stay."""
    _act(job, "cancel", url, data, as_json)


def pause(job: JobId, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Free the workers until `resume`; half-finished work is kept."""
    _act(job, "pause", url, data, as_json)


def resume(job: JobId, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Go on with a paused job."""
    _act(job, "resume", url, data, as_json)


def newest(client: Client, limit: int) -> list[Job]:
    """At most `limit` jobs, newest first."""
    return list(islice(client.jobs(), limit))


def reason(job: Job) -> str:
    """The reason of its failure, cut; empty if it did not fail."""
    error = job["error"]
    return cut(error["message"], MAX_REASON) if error else ""


def _act(job: str, verb: JobAction, url: Url, data: Data, as_json: bool) -> None:
    with connect(url, data) as client:
        record = client.act(job, verb)
    print_json(record) if as_json else print_status(record)


def print_status(job: Job) -> None:
    """`ftjob-…  running`"""
    console.print(*cells(job["id"]), status(job["status"]), soft_wrap=True)
