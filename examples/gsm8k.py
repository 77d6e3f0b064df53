"""Grade-school maths on a real base model: prepares GSM8K, submits a job, and prints its rewards until it has ended.

    python -m examples.gsm8k --base Qwen/Qwen3-0.6B --no-thinking --gpu 24GB --engine vllm      starts MARLaaS with what `marlaas plan`
                                                                    chooses for answers of --tokens, then does all that; or --gpus 8
    python -m examples.gsm8k --file train.jsonl                     on a running cluster (`marlaas up`), with a local file
    python -m examples.gsm8k --file train.jsonl --prepare items.jsonl     writes the items for `marlaas submit`, and does no more

A local file has GSM8K's own form, a line each: {"question": "...", "answer": "... #### 72"}. Without one the hub's `openai/gsm8k` is
downloaded, whose files are Parquet: `pip install pyarrow`.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from common.errors import InvalidInput, MarlaasError
from manager_service.http.openai.jobs.hyperparameters import parse_hyperparameters
from manager_service.launcher.commands.plan_command import EngineName, plan_for, settings_of, start_command
from manager_service.launcher.plan import PlannedRow
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import say
from marlaas_client.cli.talk import Translated
from marlaas_client.cluster_file import read_cluster_file
from marlaas_client.errors import ClientError

HUB, HUB_FILE = "openai/gsm8k", "main/train-00000-of-00001.parquet"
INSTRUCTION = r"Think step by step, then write the final answer in \boxed{}."
GRADER = {"type": "math", "name": "right", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
PROMPT_TOKENS = 512
"""Room for the longest question."""
NAME = "q"
"""The name of the base model in the cluster that this starts."""
DATA = Path(".marlaas")

Row = dict[str, Any]


def as_item(row: Any) -> Row:
    """`… #### 1,234` becomes the answer 1234. Raises InvalidInput for a row of another form."""
    _, mark, answer = str(row.get("answer", "")).rpartition("####") if isinstance(row, dict) else ("", "", "")
    if not mark or not answer.strip() or "question" not in row:
        raise InvalidInput(f"no row of GSM8K, which has a question and an answer with ####: {str(row)[:100]}")
    messages = [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]
    return {"messages": messages, "answer": answer.strip().replace(",", "")}


def read_items(file: Path) -> list[Row]:
    """Raises InvalidInput for a file without rows, or one that cannot be read."""
    items = [as_item(row) for row in read_rows(file)]
    if not items:
        raise InvalidInput(f"{file} has no rows")
    return items


def read_rows(file: Path) -> Iterator[Any]:
    """Raises InvalidInput if it is neither JSONL nor Parquet that can be read here."""
    try:
        if file.suffix == ".parquet":
            yield from _parquet(file)
            return
        yield from map(json.loads, filter(str.strip, file.read_text().split("\n")))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file}: {error}") from error


def _parquet(file: Path) -> Iterable[Row]:
    try:
        from pyarrow import parquet  # pyright: ignore
    except ImportError:
        raise InvalidInput(f"{file} is Parquet: pip install pyarrow, or give a JSONL file with --file") from None
    rows: list[Row] = parquet.read_table(file).to_pylist()  # pyright: ignore
    return rows


def from_hub() -> Path:
    """Raises InvalidInput if it cannot be had."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(HUB, HUB_FILE, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{HUB} cannot be had from the hub: give a local file with --file ({error})") from error


def jsonl(items: Sequence[Row]) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def write(items: Sequence[Row], file: Path) -> None:
    """Writes them for `marlaas submit`, and says so. Raises InvalidInput where it cannot."""
    try:
        file.write_bytes(jsonl(items))
    except OSError as error:
        raise InvalidInput(f"--prepare {file}: {error.strerror}") from error
    say(f"{len(items):,} items are in {file}: marlaas submit {file} --grader math:answer --model {NAME}")


async def train(client: AsyncOpenAI, items: Sequence[Row], model: str, hyper: Row) -> str:
    """Trains a job and prints its events; the name of the model that it makes. Raises MarlaasError if it does not succeed."""
    file = await client.files.create(file=("gsm8k.jsonl", jsonl(items)), purpose="fine-tune")
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyper}}
    job = await client.fine_tuning.jobs.create(model=model, training_file=file.id, method=method)
    query = {"stream": "true"}
    async with client.fine_tuning.jobs.with_streaming_response.list_events(job.id, extra_query=query) as events:
        async for line in events.iter_lines():
            if line.startswith("data: {"):
                say(json.loads(line.removeprefix("data: "))["message"])
    job = await client.fine_tuning.jobs.retrieve(job.id)
    if job.fine_tuned_model is None:
        raise MarlaasError(f"{job.id} {job.status}: {job.error and job.error.message}")
    return job.fine_tuned_model


class Start(NamedTuple):
    """The start of a cluster with the base model."""

    settings: dict[str, str]
    workers: int  # for rollouts
    context: int  # the most tokens of a conversation
    planned: PlannedRow | None = None


def start_for(base: str, gpu: str | None, *, gpus: int = 1, engine: EngineName = "torch", tokens: int = 512) -> Start:
    """On GPUs what `marlaas plan` chooses for answers of so many tokens; on a CPU `marlaas up` chooses by the memory at hand.

    Raises InvalidInput if nothing fits on the GPUs, and for what `marlaas plan` refuses.
    """
    settings = {"MARLAAS_BASE_MODELS": f"{NAME}={base}"}
    found = plan_for(base, gpu=gpu, gpus=gpus, engine=engine)
    needed = min(found.shape.context, tokens + PROMPT_TOKENS)
    chosen = plan_for(base, gpu=gpu, gpus=gpus, engine=engine, context=needed).chosen
    if gpu is None:
        settings |= {"MARLAAS_ENGINE": engine} if engine != "torch" else {}
        return Start(settings, 1, found.shape.context)
    if chosen is None:
        raise InvalidInput(f"{base} does not fit on {gpu}: `marlaas plan {base} --gpu {gpu}` says why")
    return Start(settings | settings_of(found, chosen), chosen.split.workers, needed, chosen)


async def run(given: argparse.Namespace, items: Sequence[Row]) -> None:
    hyper = {"max_steps": given.steps, "batch_size": given.batch, "group_size": given.group, "max_tokens": given.tokens}
    hyper |= {"chat_template_kwargs": {"enable_thinking": False}} if given.no_thinking else {}
    parse_hyperparameters(hyper)  # as the API will, before anything is started
    if given.base is None:
        await _train_on_running(given, items, hyper)
    else:
        await _train_on_new(given, items, hyper)


async def _train_on_running(given: argparse.Namespace, items: Sequence[Row], hyper: Row) -> None:
    running = read_cluster_file(given.data)
    if running is None:
        raise InvalidInput(f"no cluster runs on {given.data}: start one with `marlaas up`, or name a model with --base")
    key = (given.data / "api_key").read_text().strip()
    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
        model = await train(client, items, given.model, hyper)
    say(f"{model} is trained: {chat_command(model, given.data)}")


async def _train_on_new(given: argparse.Namespace, items: Sequence[Row], hyper: Row) -> None:
    start = start_for(given.base, given.gpu, gpus=given.gpus, engine=given.engine, tokens=given.tokens)
    if given.tokens >= start.context:
        raise InvalidInput(f"--tokens {given.tokens} leaves no room for a prompt in a context of {start.context}")
    if start.planned:
        say(f"planned: {start.planned.hours(given.steps * given.batch * given.group * given.tokens):.1f} hours")
    async with (
        LocalCluster(
            data_dir=given.data,
            rollout=start.workers,
            environment=start.settings,
            notify=lambda line: say(line, keep="\n"),
        ) as cluster,
        AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=cluster.api_key) as client,
    ):
        model = await train(client, items, NAME, hyper)
    say(
        f"{model} is trained. To talk to it:\n  {start_command(start.settings, start.workers, data_option(given.data))}\n"
        f"and, once that is ready, in another terminal:\n  {chat_command(model, given.data)}",
        keep="\n",
    )


def chat_command(model: str, data: Path) -> str:
    return f"marlaas chat {model}{data_option(data)}"


def data_option(data: Path) -> str:
    """Nothing for the folder that commands take by themselves."""
    return "" if data == DATA else f" --data {shlex.quote(str(data))}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder, or a name of the hub; starts MARLaaS with it")
    parser.add_argument("--gpu", help="as for `marlaas plan`, with --base; none: the CPU")
    parser.add_argument("--gpus", type=int, default=1, help="as for `marlaas plan`; default 1")
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default="torch", help="as for `marlaas plan`; default torch"
    )
    parser.add_argument("--file", type=Path, help="GSM8K's JSONL; none: from the hub")
    parser.add_argument("--prepare", type=Path, metavar="OUT", help="write the items there, and do no more")
    parser.add_argument("--data", type=Path, default=DATA, help="of `marlaas up`; default .marlaas")
    parser.add_argument("--model", default=NAME, help=f"the base model's name in a running cluster; default {NAME}")
    parser.add_argument("--no-thinking", action="store_true", help="tell the template of a thinking model so")
    for name, default in (("steps", 100), ("batch", 16), ("group", 8), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    given = parser.parse_args()
    if given.base is None and (given.gpu or given.gpus != 1 or given.engine != "torch"):
        parser.error("--gpu, --gpus and --engine go with --base: a cluster that runs has its own")
    return given


def main() -> None:
    given = parsed()
    try:
        items = read_items(given.file or from_hub())
        if given.prepare:
            return write(items, given.prepare)
        with Translated():
            asyncio.run(run(given, items))
    except (MarlaasError, ClientError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
