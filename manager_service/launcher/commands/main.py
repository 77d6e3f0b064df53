"""`marlaas`: the commands of users, and beside them those of operators."""

from common.errors import MarlaasError
from common.settings import refuse_unknown
from manager_service.launcher.commands import operate, plan_command, pull, up
from marlaas_client.cli.main import make_app, run
from marlaas_client.errors import ClientError

app = make_app(pull.pull, up.up, plan_command.plan, operate.workers, operate.dead)


def main() -> None:
    """Exits as `run` says; with status 1 for a setting that no service knows, too."""
    run(_program, MarlaasError, ClientError)


def _program() -> None:
    refuse_unknown()
    app()


if __name__ == "__main__":
    main()
