"""`models`: the base models that are served, and your tuned ones."""

from collections.abc import Mapping
from typing import Any

from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table


def models(url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """The base models: size, the dtype of their files, context, where they are from, and what they rule out; and your tuned models."""
    with connect(url, data) as client:
        records = client.get("/v1/models")["data"]
    if as_json:
        return print_json(records)
    bases = [record for record in records if record.get("base")]
    shown = table(
        "base model", "state", "weights", "stored as", "context", "learning rate", "from", right=["weights", "context"]
    )
    for record in bases:
        about = record["base"]
        figures = (_short(about["num_weights"]), about["dtype"], f"{about['context']:,}", about["learning_rate"])
        shown.add_row(*cells(record["id"], _turn(about), *figures, about["source"]))
    print_table(shown)
    for record in bases:
        for line in record["base"]["rules_out"]:
            say(f"{record['id']} rules out {line}")
    for record in records:
        if not record.get("base"):
            say(f"{record['id']}@{record['version']}")


def _turn(about: Mapping[str, Any]) -> str | None:
    """`open`, `closed: opens in 0.3 s`"""
    state = about.get("state")
    return f"{state}: opens in {about['opens_in_s']:.1f} s" if about.get("tier") else state


def _short(number: Any) -> str | None:
    """`596 M`; None if it is not known."""
    return None if number is None else f"{number / 1e6:,.1f} M" if number < 1e8 else f"{number / 1e6:,.0f} M"
