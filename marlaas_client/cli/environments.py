"""`env list`, `env check`: which environments the service knows, and how one plays on the base model."""

import re
from contextlib import ExitStack, suppress
from statistics import fmean
from typing import Annotated
from urllib.parse import quote

import typer

from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table
from marlaas_client.cli.samples import show
from marlaas_client.cli.submit import File, json_object, parse_hyper, upload
from marlaas_client.client import Client
from marlaas_client.dataset import Columns
from marlaas_client.errors import JobFailed, Refused
from marlaas_client.records import FINAL, Record
from marlaas_client.submission import SHORT_GRADERS, grader_of, request_of

Name = Annotated[str, typer.Argument(help="As in `env list`.")]
Args = Annotated[str, typer.Option(help="The environment's arguments as JSON.")]
CheckHyper = Annotated[list[str] | None, typer.Option("--hyper", help="key=value, may be repeated: max_tokens=64.")]
CheckModel = Annotated[str, typer.Option("--model", help="The base model, or a tuned one, ft:…, or its job, ftjob-….")]
app = typer.Typer(no_args_is_help=True, help="Environments: which there are, and whether one works.")

MAX_SUFFIX = 64
UNREACHABLE = "the OpenEnv server cannot be reached"
"""The text of a warning. A job waits for a server that starts again; a check says so."""
ITEMS, A_STEP = 10, 2
"""Items that are tried, and those of a step: as many as it keeps whole."""
CHECK: Record = {
    "batch_size": A_STEP,
    "group_size": 2,
    "max_steps": ITEMS // A_STEP,
    "max_staleness": ITEMS // A_STEP - 1,
    "learning_rate": 1e-30,
}
"""All is sampled by version 0, the base model; where the operator allows no staleness, by later ones that have learned nothing."""


@app.command("list")
def environments(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """The environments that a job may name, where each comes from, and its arguments."""
    with connect(url, data) as client:
        found = client.get("/v1/environments")["data"]
    if as_json:
        return print_json(found)
    shown = table("environment", "from", "items", "arguments")
    for one in found:
        items = "its own" if one["makes_items"] else "of a file"
        shown.add_row(*cells(one["id"], one["package"] or "built in", items, one["error"] or _arguments(one["args"])))
    print_table(shown)


def _arguments(schema: Record) -> str:
    """`grader, [top_k=3]`: those in brackets have a default."""
    needed = schema.get("required", ())
    named = [name if name in needed else _optional(name, of) for name, of in schema.get("properties", {}).items()]
    return ", ".join(named + (["…"] if schema.get("additionalProperties") else []))


def _optional(name: str, schema: Record) -> str:
    default = schema.get("default")
    return f"[{name}]" if default in (None, "", [], {}) else f"[{name}={default}]"


@app.command("check")
def check(
    name: Name,
    file: File = None,
    args: Args = "{}",
    hyper: CheckHyper = None,
    model: CheckModel = "",
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Play an environment on ten items, by a job that learns nothing, and show the conversations and the rewards.

    It ends with an error, and status 1, if a trajectory fails. The job stays in `marlaas jobs`, and no webhook hears of it; what it made is
    deleted.
    """
    environment = {"name": name, "args": parse_args(args)}
    how = {"environment": environment, "hyperparameters": CHECK | dict(map(parse_hyper, hyper or []))}
    with connect(url, data) as client, ExitStack() as undo:
        known = next((one for one in client.get("/v1/environments")["data"] if one["id"] == name), None)
        if known and known["error"]:
            say(f"warn: {name}: {known['error']}", err=True)
        training = upload(client, file, Columns()) if file else None
        if training:
            undo.callback(_delete, client, f"/v1/files/{training}")
        start = client.model_of(model)
        chosen: Record = {"model": start, "training_file": training, "suffix": _suffix(name), "webhooks": False}
        job = client.create(request_of("reinforcement", how, **chosen))["id"]
        undo.callback(_end, client, job)
        if not as_json:
            say(f"{job} plays {name}", err=True)
        _follow(client, job, name)
        _report(client, job, name, as_json=as_json)


def _follow(client: Client, job: str, name: str) -> None:
    """Says the job's warnings until it has ended. Raises JobFailed for a server that cannot be reached."""
    for event in client.follow(job):
        if event["level"] == "warn":
            say(f"warn: {event['message']}", err=True)
        if UNREACHABLE in event["message"]:
            raise JobFailed(f"the environment {name} does not work: {event['message']}")


def _suffix(name: str) -> str:
    """The suffix of a check's job, so that the list of jobs tells them apart."""
    return f"check-{re.sub('[^A-Za-z0-9-]+', '-', name)}"[:MAX_SUFFIX].rstrip("-")


def parse_args(text: str) -> Record:
    """JSON, with a grader in its short form written out. Raises InvalidInput."""
    args = json_object("--args", text)
    grader = args.get("grader")
    if isinstance(grader, str) and grader.partition(":")[0] in SHORT_GRADERS:
        args["grader"] = grader_of(grader)
    return args


def _report(client: Client, job: str, name: str, *, as_json: bool) -> None:
    """Shows one conversation of each item, and all that failed. Raises JobFailed unless everything went well."""
    found, ended = list(client.samples(job)), client.job(job)
    failed = [sample for sample in found if sample["failure"]]
    played = [sample for sample in found if not sample["failure"]]
    firsts = {(sample["step"], sample["group"]): sample for sample in reversed(played)}
    for sample in found if as_json else [*reversed(firsts.values()), *failed]:
        print_json(sample) if as_json else show(sample)
    rewards = [sample["reward"] or 0.0 for sample in played]
    if rewards and not as_json:
        shown = f"mean reward {fmean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}"
        say(f"{len(firsts)} items, {len(rewards)} trajectories: {shown}")
    if ended["status"] != "succeeded":
        reason = ended["error"]["message"] if ended["error"] else f"{job} is {ended['status']}"
        raise JobFailed(f"the environment {name} does not work: {reason}")
    if failed:
        failure = failed[0]["failure"] or {}
        reason = f"{failure['kind']}: {failure['reason']}"
        raise JobFailed(f"the environment {name}: {len(failed)} trajectories failed, the first with {reason}")


def _end(client: Client, job: str) -> None:
    """Cancels the job, or deletes what it has made."""
    found = client.job(job)
    if found["status"] not in FINAL:
        client.act(job, "cancel")
    elif model := found["fine_tuned_model"]:
        _delete(client, f"/v1/models/{quote(model, safe='')}")


def _delete(client: Client, path: str) -> None:
    with suppress(Refused):  # what a job that is being cancelled still has
        client.delete(path)
