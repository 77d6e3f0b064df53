"""`loggers`, `webhooks`: where your jobs report to."""

import sys
from typing import Annotated

import typer

from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table
from marlaas_client.errors import InvalidInput


def loggers(
    logger: Annotated[
        str | None, typer.Argument(help="`wandb`: set its key, which is asked for, or read from a pipe.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="Of a W&B server of your own.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Forget the key.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The loggers that have a key of yours; or set one's key, which is never shown again."""
    if (base_url or delete) and logger is None:
        raise InvalidInput("name the logger: marlaas loggers wandb")
    key = None if logger is None or delete else _read_key(logger)
    with connect(url, data) as client:
        if logger is not None and delete:
            answer = client.delete(f"/v1/loggers/{logger}")
        elif logger is not None:
            given = {"api_key": key} | ({"base_url": base_url} if base_url else {})
            answer = client.post(f"/v1/loggers/{logger}", given)
        else:
            answer = client.get("/v1/loggers")
    if as_json:
        return print_json(answer)
    if logger is not None:
        return say(f"the key of {logger} is {'forgotten' if delete else 'set'}")
    shown = table("logger", "server")
    for row in answer["data"]:
        shown.add_row(*cells(row["id"], row["base_url"]))
    print_table(shown)


def _read_key(logger: str) -> str:
    """Never an argument, which others on the machine could read."""
    if sys.stdin.isatty():
        return typer.prompt(f"key of {logger}", hide_input=True)
    return sys.stdin.readline().strip()


def webhooks(
    add: Annotated[str | None, typer.Option(metavar="URL", help="Tell this URL when a job ends.")] = None,
    delete: Annotated[str | None, typer.Option(metavar="ID", help="Tell it nothing more.")] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """The URLs that hear of the ends of your jobs."""
    if add and delete:
        raise InvalidInput("give --add or --delete, one of them")
    with connect(url, data) as client:
        if add:
            answer = client.post("/v1/webhooks", {"url": add})
        elif delete:
            answer = client.delete(f"/v1/webhooks/{delete}")
        else:
            answer = client.get("/v1/webhooks")
    if as_json:
        return print_json(answer)
    if add:
        return say(f"{answer['id']}\nsecret, shown once: {answer['secret']}", keep="\n")
    if delete:
        return say(f"{delete} is deleted")
    shown = table("id", "url", "events")
    for row in answer["data"]:
        shown.add_row(*cells(row["id"], row["url"], ", ".join(row["events"])))
    print_table(shown)
