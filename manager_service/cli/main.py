"""`marlaas`: the commands, and the one place where an error becomes a line and an exit status."""

import sys

import typer
from rich.console import Console

from common.errors import MarlaasError
from common.settings import refuse_unknown
from manager_service.cli import chat, jobs, operate, pull, submit, up, watch

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train LoRA adapters of a shared base model by reinforcement learning, as a service.",
)
app.command("up")(up.up)
app.command("submit")(submit.submit)
app.command("jobs")(jobs.jobs)
app.command("watch")(watch.watch)
app.command("events")(jobs.events)
app.command("cancel")(jobs.cancel)
app.command("pause")(jobs.pause)
app.command("resume")(jobs.resume)
app.command("pull")(pull.pull)
app.command("chat")(chat.chat)
app.command("workers")(operate.workers)
app.command("dead")(operate.dead)


def main() -> None:
    """Exit status: 0, 1 for an error (said in one line on standard error), 2 for wrong usage, 130 for Ctrl-C."""
    try:
        refuse_unknown()
        app()
    except MarlaasError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `marlaas events … | head`
        sys.stderr.close()
        sys.exit(0)
