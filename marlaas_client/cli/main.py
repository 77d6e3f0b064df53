"""`marlaas`: the commands, and the one place where an error becomes a line and an exit status."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from marlaas_client.cli import account, chat, environments, jobs, models, pull, receivers, samples, submit, watch
from marlaas_client.cli.output import say, visible
from marlaas_client.errors import ClientError, InvalidInput

LINE_END = "\n"
"""An error may show the last lines of a log."""
COMMANDS: tuple[Callable[..., None], ...] = (
    submit.submit,
    jobs.jobs,
    watch.watch,
    jobs.events,
    jobs.logs,
    jobs.cancel,
    jobs.pause,
    jobs.resume,
    pull.pull,
    samples.samples,
    account.ledger,
    account.usage,
    receivers.loggers,
    receivers.webhooks,
    models.models,
    chat.chat,
)
"""Each is called as its function is."""

OPERATORS = ("dead", "example", "plan", "tenants", "up", "workers")
"""Commands that the package of the service adds."""


def say_version(asked: bool) -> None:
    """The packages of the service and of the client have the same."""
    if asked:
        installed = {each.name: each.version for each in metadata.distributions()}
        say(f"marlaas {installed.get('marlaas') or installed.get('marlaas-client', 'from a folder')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=say_version, is_eager=True, help="Say the version.")]


def all_commands(version: Version = False) -> None: ...


def make_app(*operators: Callable[..., None]) -> typer.Typer:
    """The user's commands; below them `operators`, more of an operator's, or in place of those of the same names."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Train LoRA adapters of a shared base model by reinforcement learning, as a service.",
    )
    app.callback()(all_commands)
    for command in (*COMMANDS, *operators):
        app.command(command.__name__)(command)
    app.add_typer(environments.app, name="env")
    return app


def run(program: Callable[[], None], *errors: type[Exception]) -> None:
    """Exit status: 0, 1 for an error of these kinds (said in one line on standard error), 2 for wrong usage, 130 for Ctrl-C."""
    try:
        program()
    except errors as error:
        typer.secho(f"error: {visible(str(error), keep=LINE_END)}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `marlaas events … | head`
        sys.stderr.close()
        sys.exit(0)


def missing(context: typer.Context) -> None:
    raise InvalidInput(f"`marlaas {context.info_name}` {pull.ELSEWHERE}")


def main() -> None:
    app = make_app()
    for name in OPERATORS:
        as_given = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, hidden=True, context_settings=as_given)(missing)
    run(app, ClientError)


if __name__ == "__main__":
    main()
