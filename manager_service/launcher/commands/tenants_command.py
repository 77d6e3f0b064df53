"""`tenants`: who may use the cluster, with which weight and quotas; and their keys. Needs the admin key."""

from typing import Annotated, Any

import typer

from common.settings import parse_bytes
from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table
from marlaas_client.errors import InvalidInput

TENANTS = "/v1/admin/tenants"
UNLIMITED = "none"

Tenant = Annotated[str, typer.Argument(help="The tenant's id.")]
Weight = Annotated[float | None, typer.Option(help="Its part of the machines, beside the weights of the others.")]
MaxJobs = Annotated[int | None, typer.Option(help="Jobs that run at once; others wait.")]
MaxTokens = Annotated[str | None, typer.Option(help="Tokens it may use a day, or `none`: no limit.")]
MaxStored = Annotated[
    str | None, typer.Option(help="Bytes it may store, such as 20GB, or `none`: as many as the service says.")
]
app = typer.Typer(no_args_is_help=True, help="Tenants, their weights, quotas and keys (needs the admin key).")


@app.command("list")
def list_tenants(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """All tenants, with weights and quotas."""
    with connect(url, data, admin=True) as client:
        records = client.get(TENANTS)["data"]
    _show(records, as_json=as_json)


@app.command()
def add(
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    weight: Weight = None,
    max_jobs: MaxJobs = None,
    max_tokens_per_day: MaxTokens = None,
    max_stored_bytes: MaxStored = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make a tenant, and its first key."""
    with connect(url, data, admin=True) as client:
        client.post(
            TENANTS, {"id": tenant, "name": name} | _limits(weight, max_jobs, max_tokens_per_day, max_stored_bytes)
        )
        _show_key(client.post(f"{TENANTS}/{tenant}/keys", {}), as_json=as_json)


@app.command()
def key(tenant: Tenant, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Make another key. Only this command shows it; the others stay valid."""
    with connect(url, data, admin=True) as client:
        _show_key(client.post(f"{TENANTS}/{tenant}/keys", {}), as_json=as_json)


@app.command()
def quota(
    tenant: Tenant,
    weight: Weight = None,
    max_jobs: MaxJobs = None,
    max_tokens_per_day: MaxTokens = None,
    max_stored_bytes: MaxStored = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Show a tenant's weight and quotas, or change those that are given. Jobs that were made keep their weight."""
    limits = _limits(weight, max_jobs, max_tokens_per_day, max_stored_bytes)
    with connect(url, data, admin=True) as client:
        record = client.post(f"{TENANTS}/{tenant}", limits) if limits else client.get(f"{TENANTS}/{tenant}")
    _show([record], as_json=as_json)


def _limits(
    weight: float | None, max_jobs: int | None, max_tokens: str | None, max_stored: str | None
) -> dict[str, Any]:
    """The fields that were given. Raises InvalidInput."""
    limits = {"weight": weight, "max_jobs": max_jobs}
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    for name, amount, parse in (("max_tokens_per_day", max_tokens, int), ("max_stored_bytes", max_stored, parse_bytes)):
        try:
            given |= {} if amount is None else {name: None if amount == UNLIMITED else parse(amount)}
        except ValueError:
            told = "a number" if parse is int else "a size such as 20GB"
            raise InvalidInput(f"--{name.replace('_', '-')} {amount}: {told}, or {UNLIMITED}") from None
    return given


def _show(records: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        return print_json(records)
    numbers = ("weight", "max_jobs", "max_tokens_per_day", "max_stored_bytes")
    shown = table("tenant", "name", *numbers, right=numbers)
    for record in records:
        limits = (UNLIMITED if record[name] is None else record[name] for name in numbers)
        shown.add_row(*cells(record["id"], record["name"], *limits))
    print_table(shown)


def _show_key(record: dict[str, Any], *, as_json: bool) -> None:
    print_json(record) if as_json else say(record["key"])
