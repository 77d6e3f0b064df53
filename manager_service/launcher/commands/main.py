"""`marlaas`: the commands of users and those of operators."""

from common.errors import MarlaasError
from common.settings import refuse_unknown
from manager_service.launcher.commands import base_command, example, merge, plan_command, tenants_command, up
from marlaas_client.cli.main import make_app, run
from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table
from marlaas_client.cli.view import wanted_lines, workers_view
from marlaas_client.errors import ClientError


def workers(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """The workers, and how busy they are (needs the admin key)."""
    with connect(url, data, admin=True) as client:
        records, wanted = client.get("/v1/cluster/workers")["data"], client.get("/v1/cluster/wanted")
    if as_json:
        return print_json(records)
    print_table(workers_view(records))
    in_turns = {each["base_model"] for each in records if each.get("pool")}  # of these a closed worker is one too
    for line in wanted_lines({base: one for base, one in wanted.items() if base not in in_turns}):
        say(line)


def dead(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Messages that no worker could handle (needs the admin key)."""
    with connect(url, data, admin=True) as client:
        records = list(client.items("/v1/cluster/dead"))
    if as_json:
        return print_json(records)
    if not records:
        return say("none")
    shown = table("job", "stream", "deliveries", "reason", right=["deliveries"])
    for record in records:
        shown.add_row(*cells(*(record.get(name) for name in ("job", "stream", "deliveries", "reason"))))
    print_table(shown)


app = make_app(merge.pull, up.up, plan_command.plan, workers, dead)
app.command("example", context_settings=example.SETTINGS)(example.example)
app.add_typer(base_command.app, name="base")
app.add_typer(tenants_command.app, name="tenants")


def main() -> None:
    """Exits as `run` says; with status 1 for a setting that no service knows, too."""
    run(_program, MarlaasError, ClientError)


def _program() -> None:
    refuse_unknown()
    app()


if __name__ == "__main__":
    main()
