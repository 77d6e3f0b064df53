"""`submit`: upload the files and create a job."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from marlaas_client.adapters import check_folder
from marlaas_client.cli.jobs import print_status
from marlaas_client.cli.options import Data, Json, Url, connect, connect_operator
from marlaas_client.cli.output import print_json, say, typed
from marlaas_client.cli.watch import watch_jobs
from marlaas_client.client import Client
from marlaas_client.dataset import TABLES, TALK, Columns, as_jsonl, rows_of_dataset, rows_of_file
from marlaas_client.errors import InvalidInput, Refused
from marlaas_client.records import Job, Record
from marlaas_client.submission import Method, content_of, grader_of, request_of

Dataset = Annotated[
    str | None,
    typer.Option(help="Instead of FILE: a folder, or a dataset of the hub: NAME, NAME:CONFIGURATION, NAME@REVISION."),
]
SplitName = Annotated[str, typer.Option(help="Of the dataset.")]
ValidationSplit = Annotated[str | None, typer.Option(help="Of the dataset: held-out items.")]
Prompt = Annotated[str | None, typer.Option(help="The column that says what is asked.")]
Answer = Annotated[str | None, typer.Option(help="The column that becomes the field `answer`.")]
Completion = Annotated[
    str | None,
    typer.Option(
        help="The column that a supervised job learns, as the assistant's answer to the prompt, by the chat template."
    ),
]
Learned = Annotated[
    Method, typer.Option(help="supervised: the file's own answers are learned, and nothing is sampled.")
]
Kept = Annotated[str | None, typer.Option(help="The other columns that are kept, by commas. Default: all.")]
Environment = Annotated[str | None, typer.Option(help='Name, or JSON such as {"name": "search", "args": {…}}.')]
Hyper = Annotated[
    list[str] | None,
    typer.Option(
        help='key=value, may be repeated: --hyper max_steps=40; lists as JSON in quotes: lora_targets=["q_proj"]'
    ),
]
Model = Annotated[
    str,
    typer.Option(help="The base model, or a tuned one to go on from: ft:…, or its job, ftjob-…; @<version> pins it."),
]
Start = Annotated[
    Path | None, typer.Option(help="A folder with an adapter of the base model in PEFT's form, to go on from.")
]

Log = Annotated[
    list[str] | None, typer.Option(help="Send the figures to wandb:PROJECT, or trackio:PROJECT; may be repeated.")
]
File = Annotated[Path | None, typer.Argument(help="JSONL, CSV or Parquet. Without it the environment makes items.")]
Validation = Annotated[Path | None, typer.Option(help="Held-out items, in a file as the other.")]
Grader = Annotated[
    str | None, typer.Option(help="JSON, @file.json, @file.py, or short: string_check:FIELD, math:FIELD (of the item).")
]
Suffix = Annotated[str | None, typer.Option(help="Becomes part of the tuned model's name.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all randomness; drawn and shown if not given.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show the job live until it has ended.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Say what the job would need, and create none.")]


def submit(
    file: File = None,
    validation: Validation = None,
    dataset: Dataset = None,
    split: SplitName = "train",
    validation_split: ValidationSplit = None,
    prompt: Prompt = None,
    answer: Answer = None,
    completion: Completion = None,
    columns: Kept = None,
    method: Learned = "reinforcement",
    grader: Grader = None,
    environment: Environment = None,
    hyper: Hyper = None,
    model: Model = "",
    adapter: Start = None,
    log: Log = None,
    suffix: Suffix = None,
    seed: Seed = None,
    watch: Watch = False,
    estimate: Estimate = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Train an adapter on a file of items."""
    how = method_of(grader, environment, hyper or [], supervised=method == "supervised")
    fields = {"prompt": prompt, "answer": answer, "completion": completion}
    mapped = mapping(fields, columns, supervised=method == "supervised")
    files = SourceFiles(*sources(file, validation, dataset, split, validation_split), mapped, adapter)
    request = request_of(method, how, model=model, training_file=None, suffix=suffix, seed=seed, log=log or ())
    with connect(url, data) as client, ExitStack() as unused:
        complete(client, request, files, unused)
        if estimate:
            return show_estimate(client.estimate(request), as_json=as_json)
        job = create(client, request, says_estimate=not as_json)
        unused.pop_all()
        tell(client, job, url, data, watch=watch, as_json=as_json)


def complete(client: Client, request: Record, files: "SourceFiles", unused: ExitStack) -> None:
    """Uploads the files of a request, and puts their ids and the model's name into it. `unused` deletes them at its end."""
    if files.adapter:
        check_folder(files.adapter)
    request["model"] = client.model_of(request["model"])
    for field, source in (("training_file", files.training), ("validation_file", files.validation)):
        if source:
            try:
                client.attach(request, field, upload(client, source, files.columns), unused)
            except Refused as error:
                raise Refused(f"{field}: {error}", error.status) from error
    if files.adapter:
        client.attach(request, "adapter_file", client.upload_adapter(files.adapter)["id"], unused)


def tell(client: Client, job: Job, url: str | None, data: Path | None, *, watch: bool, as_json: bool) -> None:
    """Prints the job, then watches it until it has ended, or says how to; and what may be done with its model."""
    name = job["id"]
    print_json(job) if as_json else print_status(job)
    if watch:
        with connect_operator(url, data) as operator:
            watch_jobs(client, [name], operator=operator, as_json=as_json)
        if not as_json and (tuned := client.job(name)["fine_tuned_model"]):
            say(
                f"model {tuned}\ntalk to it:   {typed()} chat {name}\ntake it home: {typed()} pull {name}",
                keep="\n",
                err=True,
            )
    elif not as_json:
        say(f"{typed()} watch {name}", err=True)


def method_of(grader: str | None, environment: str | None, hyper: list[str], *, supervised: bool = False) -> Record:
    """`method.reinforcement`, or `method.supervised`, of the request. Raises InvalidInput if the options do not parse."""
    method: Record = {}
    if supervised and (grader or environment):
        raise InvalidInput("a supervised job learns the file's own answers: leave out --grader and --environment")
    if grader:
        method["grader"] = parse_grader(grader)
    if environment:
        method["environment"] = parse_environment(environment)
    if not method and not supervised:
        raise InvalidInput(
            "say how answers are judged: --grader string_check:answer, or --environment calculator;"
            " or learn the file's own answers: --method supervised"
        )
    if hyper:
        method["hyperparameters"] = dict(map(parse_hyper, hyper))
    return method


def parse_grader(text: str) -> Record:
    """JSON, `@file.json`, `@file.py`, or `type:field`. Raises InvalidInput."""
    file = Path(text[1:]) if text.startswith("@") else None
    text = _read(file) if file else text
    if file and file.suffix == ".py":
        return {"type": "python", "name": file.stem, "source": text}
    return json_object("--grader", text) if file or text.lstrip().startswith("{") else grader_of(text)


def parse_environment(text: str) -> Record:
    """JSON, or a name alone. Raises InvalidInput."""
    return json_object("--environment", text) if text.lstrip().startswith("{") else {"name": text}


def parse_hyper(text: str) -> tuple[str, Any]:
    """`max_steps=40` -> ("max_steps", 40); a value that is not JSON is a string. Raises InvalidInput."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidInput(f"--hyper {text}: write key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def json_object(option: str, text: str) -> Record:
    """Raises InvalidInput."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{option}: must be a JSON object")
    return cast(Record, value)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None


def create(client: Client, request: Record, *, says_estimate: bool) -> Job:
    """Creates a job. Says before what it would need, if `says_estimate`."""
    if says_estimate:
        show_estimate(client.estimate(request), as_json=False)
    return client.create(request)


def show_estimate(found: Record, *, as_json: bool) -> None:
    if as_json:
        return print_json(found)
    parts = [f"{found['num_steps']:,} steps", f"{found['num_trajectories']:,} trajectories"]
    parts += [f"about {found['tokens']:,} tokens, at most {found['max_tokens']:,}"]
    if found["seconds"] is not None:
        parts.append(f"at least {spent(found['seconds'])}, if nothing else runs")
    within = found["steps_within_limit"]
    if within is not None and within < found["num_steps"]:
        parts.append(f"max_tokens_total ends it after about {within:,} steps")
    say(f"estimate: {'; '.join(parts)}", err=True)


def spent(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- files ----------------------------------------------------------------------------------------------------------


class DatasetSplit(NamedTuple):
    """A part of a dataset."""

    dataset: str
    name: str


FileSource = Path | DatasetSplit


class SourceFiles(NamedTuple):
    """The files of a request."""

    training: FileSource | None
    validation: FileSource | None
    columns: Columns
    adapter: Path | None


def sources(
    file: Path | None, validation: Path | None, dataset: str | None, split: str, validation_split: str | None
) -> tuple[FileSource | None, FileSource | None]:
    """The sources of the items and of the held-out ones. Raises InvalidInput for options that exclude each other."""
    if dataset is None:
        if validation_split:
            raise InvalidInput("--validation-split is a part of a --dataset: name one, or give --validation FILE")
        return file, validation
    if file or (validation and validation_split):
        raise InvalidInput("give FILE or --dataset, and --validation or --validation-split, one of each")
    return DatasetSplit(dataset, split), DatasetSplit(dataset, validation_split) if validation_split else validation


def mapping(fields: dict[str, str | None], columns: str | None, *, supervised: bool = False) -> Columns:
    given = {field: column for field, column in fields.items() if column}
    kept = None if columns is None else frozenset(filter(None, columns.split(",")))
    return Columns(given, kept, talks=supervised and not given.keys().isdisjoint(TALK))


def upload(client: Client, source: FileSource, columns: Columns) -> str:
    """The id of the file that the API made of it. Raises InvalidInput, with row and column."""
    if isinstance(source, DatasetSplit):
        name = re.sub(r"[^\w.-]+", "_", f"{Path(source.dataset).name}-{source.name}.jsonl")
        rows = rows_of_dataset(source.dataset, source.name)
    elif columns != Columns() or source.suffix.lower() in TABLES:
        name, rows = f"{source.stem}.jsonl", rows_of_file(source)
    else:
        return client.upload(*content_of(source))["id"]
    with as_jsonl(rows, columns) as file:
        return client.upload(name, file)["id"]
