"""`usage`, `ledger`: what a tenant used, and what became of a job's trajectories."""

from typing import Annotated

import typer

from marlaas_client.cli.options import Data, JobId, Json, Url, connect
from marlaas_client.cli.output import cells, print_json, print_table, say, table
from marlaas_client.client import JOBS

COUNTERS = (
    "prompt_tokens",
    "sampled_tokens",
    "trained_tokens",
    "wasted_tokens",
    "rollout_s",
    "env_s",
    "train_s",
    "grader_tokens",
)
FATES = ("issued", "trained", "filtered", "stale", "failed", "cancelled", "in_flight")


def usage(
    job: Annotated[str | None, typer.Argument(help="Of one job alone.")] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Tokens and busy seconds of your jobs, and of your completions and grader runs (`inference`)."""
    with connect(url, data) as client:
        report = client.get(f"{JOBS}/{job}/usage" if job else "/v1/usage")
    if as_json:
        return print_json(report)
    shown = table("job", *COUNTERS, right=COUNTERS)
    for row in [report] if job else [*report["data"], report["total"] | {"job": "total"}]:
        shown.add_row(*cells(row["job"], *(row[counter] for counter in COUNTERS)))
    print_table(shown)
    if not job:
        limit = report["max_tokens_per_day"]
        say(f"{report['tokens_today']:,} tokens today" + ("" if limit is None else f" of {limit:,}"))
        say(f"{report['stored_bytes']:,} bytes stored of {report['max_stored_bytes']:,}")


def ledger(job: JobId, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """The fate of each of a job's trajectories: issued is the sum of all others."""
    with connect(url, data) as client:
        counts = client.ledger(job)
    if as_json:
        return print_json(counts)
    shown = table(*FATES, right=FATES)
    shown.add_row(*cells(*(counts[fate] for fate in FATES)))
    print_table(shown)
