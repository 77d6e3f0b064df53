"""`samples`: the conversations that a job's steps were trained on, or that its evaluations had, to read or as JSONL."""

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.text import Text

from marlaas_client.cli.options import Data, JobId, Json, Url, connect
from marlaas_client.cli.output import console, print_json, say, visible
from marlaas_client.client import Client
from marlaas_client.errors import InvalidInput
from marlaas_client.records import Record, Sample

INDENT = 2
TITLES = {"prompt": "prompt", "model": "model", "environment": "environment or tool"}
LINE_ENDS = "\n\t"


Step = Annotated[
    int | None,
    typer.Option("--step", "--version", help="That was trained on them, or evaluated. Default: the newest."),
]
Evaluation = Annotated[bool, typer.Option("--evaluation", help="What versions said to the first held-out items.")]
Item = Annotated[int | None, typer.Option(min=0, help="One of those: what the newest versions said to it. From 0.")]
Best = Annotated[bool, typer.Option("--best", help="Those of the largest reward.")]
Worst = Annotated[bool, typer.Option("--worst", help="Those of the smallest reward.")]
Failed = Annotated[bool, typer.Option("--failed", help="Those that failed, and have no reward.")]
Limit = Annotated[int, typer.Option(min=1, help="How many are shown.")]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--jsonl",
        help="All that are kept, a line each; of all steps, or with --evaluation of all of those, without --step.",
    ),
]


def samples(
    job: JobId,
    step: Step = None,
    evaluation: Evaluation = False,
    item: Item = None,
    best: Best = False,
    worst: Worst = False,
    failed: Failed = False,
    limit: Limit = 4,
    jsonl: JsonLines = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Whole conversations of a step or an evaluation, with their rewards."""
    if best + worst + failed > 1:
        raise InvalidInput("give one of --best, --worst and --failed")
    asked: Record = {"failed": failed} if failed or best or worst else {}
    evaluation = evaluation or item is not None
    asked |= {"evaluation": True} if evaluation else {}
    asked |= {} if item is None else {"item": item}
    asked |= {"version": step} if step is not None else {} if jsonl else {"newest": 1 if item is None else limit}
    with connect(url, data) as client:
        found = client.samples(job, **asked)
        if jsonl:
            for sample in found:
                print_json(sample)
            return
        shown = chosen(found, best=best, worst=worst)[:limit]
        if not shown and not as_json:
            say(_none(client, job, step, rewarded=best or worst, evaluation=evaluation and not failed))
    for sample in shown:
        print_json(sample) if as_json else show(sample)


def _none(client: Client, job: str, step: int | None, *, rewarded: bool, evaluation: bool) -> str:
    """The reason why there is nothing to show."""
    if step is not None and step > (reached := max(client.job(job)["version"], 0)):
        return f"There are no samples of step {step}: the job is at step {reached}."
    if evaluation:
        return "No such answers are kept: of each evaluation the first few held-out items' are, of a job with a validation file."
    return "No sample that is kept has a reward." if rewarded else "No such samples are kept."


def chosen(found: Iterable[Sample], *, best: bool, worst: bool) -> list[Sample]:
    """The samples in the order in which they are shown; by reward those that have one, as a supervised job's have not."""
    if not best and not worst:
        return list(found)
    rewarded = [sample for sample in found if sample["reward"] is not None]
    return sorted(rewarded, key=lambda sample: sample["reward"] or 0.0, reverse=best)


def show(sample: Sample) -> None:
    """Prints a conversation, its turns indented, as wide as the terminal."""
    reward = "none" if sample["reward"] is None else f"{sample['reward']:.3g}"
    place = f"step {sample['step']}  group {sample['group']}  sample {sample['sample']}"
    if (item := sample.get("item")) is not None:
        place = f"evaluation of version {sample['version']}  held-out item {item}"
    console.print(Text(visible(f"{place}  reward {reward}  {sample['stop_reason']}"), "bold"))
    for name, part in sample["reward_parts"].items():
        _block(f"{name}: {part:.3g}")
    if failure := sample["failure"]:
        _block(f"{failure['kind']}: {failure['reason']}", style="red")
    for turn in sample["turns"] or _texts(sample):
        _block(f"[{TITLES.get(turn['by'], turn['by'])}]", style="dim")
        _block(turn["text"])
    for verdict in sample["verdicts"]:
        for what in ("prompt", "reply"):
            _block(f"[{what} of the grader {verdict['grader']}]", style="dim")
            _block(verdict[what])
    dropped: int = (sample["written"] or {}).get("num_dropped", 0)
    if dropped:
        _block(f"({dropped:,} more tokens are not kept)", style="dim")
    say("")


def _texts(sample: Sample) -> list[dict[str, str]]:
    """The texts of a sample whose tokens are not kept: its last message and its last turn."""
    return [{"by": by, "text": text} for by, text in (("prompt", sample["prompt"]), ("model", sample["text"])) if text]


def _block(text: str, style: str = "") -> None:
    shown = Text(visible(text, keep=LINE_ENDS), style)
    for line in shown.wrap(console, console.width - INDENT, overflow="fold"):
        line.rstrip()
        line.pad_left(INDENT)
        console.print(line)
