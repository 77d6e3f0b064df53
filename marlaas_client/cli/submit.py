"""`submit`: upload the files and create a job."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from marlaas_client.cli.jobs import print_status
from marlaas_client.cli.options import Data, Json, Url, connect, connect_operator
from marlaas_client.cli.output import print_json
from marlaas_client.cli.watch import watch_jobs
from marlaas_client.errors import InvalidInput
from marlaas_client.records import Record
from marlaas_client.submission import Method, grader_of


def submit(
    file: Annotated[Path | None, typer.Argument(help="JSONL. Without it the environment makes items.")] = None,
    validation: Annotated[Path | None, typer.Option(help="JSONL of held-out items.")] = None,
    method: Annotated[
        Method, typer.Option(help="supervised: the file's own answers are learned, and nothing is sampled.")
    ] = "reinforcement",
    grader: Annotated[
        str | None, typer.Option(help="JSON, @file.json, or short: string_check:<field of the item>, math:<field>.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help='Name, or JSON such as {"name": "search", "args": {…}}.')
    ] = None,
    hyper: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value, may be repeated; lists as JSON: --hyper max_steps=40 --hyper 'lora_targets=[\"q_proj\"]'"
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The base model, or a tuned one, ft:…, to go on from.")] = "tiny",
    suffix: Annotated[str | None, typer.Option(help="Becomes part of the tuned model's name.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness; drawn and shown if not given.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show the job live until it has ended.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Train an adapter on a file of items."""
    how = method_of(grader, environment, hyper or [], supervised=method == "supervised")
    with connect(url, data) as client, connect_operator(url, data) as operator:
        job = client.submit(file, method=method, validation=validation, model=model, suffix=suffix, seed=seed, **how)
        if as_json:
            print_json(job)
        else:
            print_status(job)
        if watch:
            watch_jobs(client, [job["id"]], operator=operator, as_json=as_json)


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
    """JSON, `@file`, or `type:field`. Raises InvalidInput."""
    if text.startswith("@"):
        return _json("--grader", _read(Path(text[1:])))
    if text.lstrip().startswith("{"):
        return _json("--grader", text)
    return grader_of(text)


def parse_environment(text: str) -> Record:
    """JSON, or a name alone. Raises InvalidInput."""
    return _json("--environment", text) if text.lstrip().startswith("{") else {"name": text}


def parse_hyper(text: str) -> tuple[str, Any]:
    """`max_steps=40` -> ("max_steps", 40); a value that is not JSON is a string. Raises InvalidInput."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidInput(f"--hyper {text}: write key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _json(option: str, text: str) -> Record:
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
