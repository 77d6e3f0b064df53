"""`marlaas`: the commands, and the one place where an error becomes a line and an exit status."""

import sys

import typer

from common.errors import MarlaasError
from common.settings import refuse_unknown
from manager_service.cli import account, chat, jobs, models, operate, plan, pull, receivers, samples, submit, up, watch
from manager_service.cli.output import visible

LINE_END = "\n"
"""An error may show the last lines of a log."""

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
app.command("logs")(jobs.logs)
app.command("cancel")(jobs.cancel)
app.command("pause")(jobs.pause)
app.command("resume")(jobs.resume)
app.command("pull")(pull.pull)
app.command("samples")(samples.samples)
app.command("ledger")(account.ledger)
app.command("usage")(account.usage)
app.command("loggers")(receivers.loggers)
app.command("webhooks")(receivers.webhooks)
app.command("models")(models.models)
app.command("plan")(plan.plan)
app.command("chat")(chat.chat)
app.command("workers")(operate.workers)
app.command("dead")(operate.dead)


def main() -> None:
    """Exit status: 0, 1 for an error (said in one line on standard error), 2 for wrong usage, 130 for Ctrl-C."""
    try:
        refuse_unknown()
        app()
    except MarlaasError as error:
        typer.secho(f"error: {visible(str(error), keep=LINE_END)}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `marlaas events … | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
