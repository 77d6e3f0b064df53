"""`plan`: says what of a base model fits, before anything is started or downloaded but its configuration."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.settings import Settings, resolve_config
from manager_service.local.plan import CORE, MICRO_BATCH_TOKENS, Device, Fit, Plan, make_plan, parse_gpu
from marlaas_client.cli.options import Json
from marlaas_client.cli.output import cells, print_json, print_table, say, table

COLUMNS = ("context", "trainer GB", "layers again", "keys and values GB", "rows at once", "tokens/s at most")


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a name of the hub, or a name in MARLAAS_BASE_MODELS.")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="24GB, 80GiB, or a name such as l4 or h100. Default: this machine's CPU."),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=64, help="This one alone.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the adapters.")] = 16,
    as_json: Json = False,
) -> None:
    """Say what of a base model fits on one device: context, rows at once, and the most tokens a second."""
    where = Settings().models.get(model, model)
    shape = read_shape(resolve_config(where))
    if context and context > shape.context:
        raise InvalidInput(f"--context {context} is above {shape.context}, the model's own")
    device = parse_gpu(gpu) if gpu else CORE._replace(memory=_own_memory())
    found = make_plan(shape, device, itemsize=2 if device.gpu else 4, rank=rank, context=context)
    print_json(as_record(found)) if as_json else show(found, model, where)
    if found.chosen is None:
        raise typer.Exit(1)


def read_shape(folder: Path) -> BaseShape:
    """Raises InvalidInput for a model whose sizes are not known here."""
    try:
        return BaseShape.of(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder}: {error}") from error


def as_record(found: Plan) -> dict[str, Any]:
    contexts = [
        {
            "context": fit.context,
            "trainer_bytes": round(fit.training.total),
            "checkpointed_layers": fit.num_checkpointed,
            "kv_bytes": fit.kv,
            "rows": fit.rows,
            "max_tokens_per_s": round(fit.most_tokens_per_s),
        }
        for fit in found.fits
    ]
    chosen = found.chosen
    return {
        "num_weights": found.shape.num_weights,
        "weights_bytes": found.weights,
        "memory_bytes": found.device.memory,
        "contexts": contexts,
        "settings": settings_of(chosen, found.device) if chosen else None,
    }


def show(found: Plan, model: str, where: str) -> None:
    device = found.device
    kind, dtype = ("GPU", "bfloat16") if device.gpu else ("CPU", "float32")
    say(
        f"{model}: {found.shape.num_weights / 1e6:,.0f} M weights, {found.weights / 1e9:.2f} GB in {dtype}, once for rollouts and once"
        f" for training; {kind} of {device.memory / 1e9:.0f} GB"
    )
    shown = table(*COLUMNS, right=COLUMNS)
    for fit in found.fits:
        speed = f"{fit.most_tokens_per_s:,.0f}" if fit.fits else "does not fit"
        figures = (f"{fit.training.total / 1e9:.2f}", fit.num_checkpointed, f"{fit.kv / 1e9:.2f}", fit.rows, speed)
        shown.add_row(*cells(f"{fit.context:,}", *figures))
    print_table(shown)
    if found.chosen is None:
        return say(advice(found))
    say("tokens/s: what memory and arithmetic allow; an engine reaches a part of it. Start it with:")
    settings = settings_of(found.chosen, device) | {"MARLAAS_BASE_MODELS": f"q={where}"}
    say(f"  {' '.join(f'{name}={value}' for name, value in settings.items())} marlaas up")


def settings_of(fit: Fit, device: Device) -> dict[str, str]:
    """The settings with which services follow the plan."""
    found = {"MARLAAS_MAX_CONTEXT": str(fit.context), "MARLAAS_ROLLOUT_KV_BYTES": str(fit.kv)}
    if not device.gpu:
        return found | ({"MARLAAS_TRAINER_CHECKPOINTING": "true"} if fit.num_checkpointed else {})
    return {
        "MARLAAS_ROLLOUT_DEVICE": "cuda",
        "MARLAAS_TRAINER_DEVICE": "cuda",
        **found,
        "MARLAAS_TRAINER_MICRO_BATCH_TOKENS": str(max(MICRO_BATCH_TOKENS, fit.context)),
        "MARLAAS_TRAINER_MEMORY_BYTES": str(int(fit.training.kept)),
    }


def advice(found: Plan) -> str:
    """Advice where nothing fits."""
    least = min(found.fits, key=lambda fit: fit.training.total)
    if 2 * found.weights > found.device.memory:
        cause = "two copies of the weights are more than the memory"
    else:
        cause = f"beside the weights a context of {least.context:,} does not fit"
    other = "a device of its own for the trainer (MARLAAS_TRAINER_DEVICE=cuda:1)" if found.device.gpu else "a GPU"
    return f"nothing fits: {cause}. A smaller base model helps, a shorter --context, or {other}."


def _own_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
