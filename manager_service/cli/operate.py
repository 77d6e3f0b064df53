"""`workers, dead`: for operators of the cluster."""

from manager_service.cli.options import Data, Json, Url, connect
from manager_service.cli.output import cells, console, print_json, table
from manager_service.cli.view import workers_view


def workers(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """The workers, and how busy they are."""
    with connect(url, data) as client:
        records = client.get("/v1/cluster/workers")["data"]
    print_json(records) if as_json else console.print(workers_view(records))


def dead(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Messages that no worker could handle (needs the admin key)."""
    with connect(url, data, admin=True) as client:
        records = list(client.items("/v1/cluster/dead"))
    if as_json:
        return print_json(records)
    if not records:
        return console.print("none")
    shown = table("job", "stream", "deliveries", "reason", right=["deliveries"])
    for record in records:
        shown.add_row(*cells(*(record.get(name) for name in ("job", "stream", "deliveries", "reason"))))
    console.print(shown)
