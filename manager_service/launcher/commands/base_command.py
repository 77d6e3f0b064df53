"""`base push`: brings a base model into the store, from which workers on any machine fetch it."""

import asyncio
import re
from functools import partial
from typing import Annotated

import typer

from common.errors import InvalidInput
from common.peers.base_fetch import folder_of
from common.settings import Settings
from common.store.bases import push_base
from common.store.objects import Objects
from marlaas_client.cli.options import Data, Json
from marlaas_client.cli.output import print_json, say

app = typer.Typer(no_args_is_help=True, callback=lambda: None, help="Base models in the store.")


@app.command()
def push(
    name: Annotated[str, typer.Argument(help="For people: letters, digits, '.', '_' and '-'.")],
    folder: Annotated[str, typer.Argument(help="Its folder, or its name on the hub.")],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Bring a base model into the store of MARLAAS_STORE_URL, or of `marlaas up`, and say what names it there. One that was interrupted
    goes on where it was."""
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise InvalidInput(f"base model name {name!r}: letters, digits, '.', '_' and '-' only")
    settings = Settings(data_dir=data) if data else Settings()
    path = folder_of(folder, settings, with_weights=True)
    pushing = push_base(Objects.open(settings.store), name, path, partial(say, err=True))
    where = asyncio.run(pushing)
    setting = f"MARLAAS_BASE_MODELS={name}={where}"
    print_json({"base_model": where, "setting": setting}) if as_json else say(setting)
