"""`chat`: talk to a model."""

from typing import Annotated, Any

import typer

from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import print_json


def chat(
    model: Annotated[
        str, typer.Argument(help="A base model, ft:…, or a job, ftjob-…; @<version> pins the latter two.")
    ],
    message: Annotated[str | None, typer.Argument(help="Without it: a conversation, until an empty line.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Ask a model once, or talk to it."""
    from marlaas_client.cli.talk import Talk  # imported here: `openai` takes a second, and no other command needs it

    options: dict[str, Any] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    with connect(url, data) as client:
        options["model"] = client.model_of(model)
        talk = Talk(client, options)
        if as_json:
            print_json(talk.answer(message if message is not None else typer.prompt("you")))
        elif message is not None:
            talk.show(message)
        else:
            talk.converse()
