"""`plan`: says what of a base model fits, before anything is started or downloaded but its configuration."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.families import check_weights, unsupported, unsupported_by_modules, unsupported_on_cpu
from common.models.host_memory import host_limit
from common.peers.base_fetch import folder_of
from common.settings import LEAST_CONTEXT, Settings
from common.text.model_folder import OwnSettings, read_config
from manager_service.launcher.engines import CORE, LORA_RANKS, EngineName, max_lora_rank, parse_gpu
from manager_service.launcher.fitting import settings_for
from manager_service.launcher.plan import NAMED_RUN, DeviceSplit, Plan, PlannedRow, make_plan
from marlaas_client.cli.options import Json
from marlaas_client.cli.output import cells, print_json, print_table, say, table, typed

COLUMNS = (
    "context",
    "trainer GB",
    "layers again",
    "keys and values GB",
    "rows at once",
    "tokens/s",
    "trained/s",
    "hours",
)
OWNERS = ("rollout GPUs", "trainer GPUs")


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a name of the hub, or a name in MARLAAS_BASE_MODELS.")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="24GB, 80GiB, or a name such as l4 or h100. Default: this machine's CPU."),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64, help="How many of them, in one machine.")] = 1,
    engine: Annotated[
        EngineName, typer.Option("--engine", envvar="MARLAAS_ENGINE", help="That samples: the embedded one, or vLLM.")
    ] = "torch",
    context: Annotated[int | None, typer.Option("--context", min=LEAST_CONTEXT, help="Only this one.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, max=LORA_RANKS[-1], help="Of the adapters.")] = 16,
    as_json: Json = False,
) -> None:
    """Say what of a base model fits on one device or several: context, rows at once, and tokens a second."""
    where = Settings().models.get(model, model)
    found = plan_for(where, gpu=gpu, gpus=gpus, engine=engine, context=context, rank=rank)
    print_json(as_record(found)) if as_json else show(found, model, where)
    if found.chosen is None:
        raise typer.Exit(1)


def plan_for(
    where: str,
    *,
    gpu: str | None,
    gpus: int = 1,
    engine: EngineName = "torch",
    context: int | None = None,
    rank: int = 16,
) -> Plan:
    """Raises InvalidInput for a model that trainers or the engine do not compute, of unknown sizes, or with a
    `marlaas.json` of no use."""
    folder = folder_of(where, Settings(), with_weights=False)
    OwnSettings.load(folder)
    config, shape = read_config(folder), BaseShape.load(folder)
    is_whole = folder == Path(where) and any(folder.glob("*.safetensors"))  # a download may be under way
    if is_whole and not any(unsupported(config)):
        check_weights(folder, shape)
    if context and context > shape.context:
        raise InvalidInput(f"--context {context} is above {shape.context}, the model's own")
    device = parse_gpu(gpu) if gpu else CORE._replace(memory=host_limit())
    modules = _config_of(folder) if device.gpu or any(unsupported(config)) else None  # our decoder computes the others
    if modules and (refused := list(unsupported_by_modules(modules))):
        who = "trainers do" if engine == "vllm" else "trainers and the embedded engine do"
        raise InvalidInput(f"{where}: {who} not compute {', nor '.join(refused)}")
    if engine == "vllm" and not device.gpu and (refused := list(unsupported_on_cpu(config))):
        raise InvalidInput(
            f"{where}: on a CPU vLLM does not compute {', nor '.join(refused)}: leave --engine vllm out, or name a --gpu"
        )
    return make_plan(
        shape,
        device,
        rank=rank,
        engine=engine,
        num_devices=gpus,
        context=context,
        modules=modules is not None,
    )


def _config_of(folder: Path) -> Any:
    """The configuration as transformers reads it. Raises InvalidInput for one that it does not know."""
    from transformers import AutoConfig  # here: it takes a second, and few commands need it

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidInput(f"{folder}: transformers cannot read it: {reason}") from error


def as_record(found: Plan) -> dict[str, Any]:
    chosen = found.chosen
    return {
        "num_weights": found.shape.num_weights,
        "weights_bytes": found.weights,
        "memory_bytes": found.device.memory,
        "contexts": [
            {
                "context": row.context,
                "rollout_workers": row.split.workers,
                "tensor_parallel": row.split.parallel,
                "trainer_ranks": row.split.ranks,
                "trainer_bytes": round(row.trainer.training.total),
                "checkpointed_layers": _num_again(found, row),
                "kv_bytes": row.rollout.kv,
                "rows": row.rows,
                "tokens_per_s": round(row.tokens_per_s),
                "trained_tokens_per_s": round(row.trained_per_s),
                "hours": round(row.hours(), 2) if row.rows else None,
                "sampling_share": round(row.sampling_share, 3) if found.in_turn else None,
            }
            for row in found.rows
        ],
        "settings": settings_of(found, chosen) if chosen else None,
    }


def _num_again(found: Plan, row: PlannedRow) -> int:
    return found.shape.num_layers if row.trainer.again else 0


def show(found: Plan, model: str, where: str) -> None:
    shape, device = found.shape, found.device
    kind, dtype = ("GPU", "bfloat16") if device.gpu else ("CPU", "float32")
    active = f", {_millions(shape.num_active)} M of them for a token" if shape.experts else ""
    say(
        f"{model}: {_millions(shape.num_weights)} M weights{active}, {found.weights / 1e9:.2f} GB in {dtype}, once for rollouts and once"
        f" for training; {kind} of {device.memory / 1e9:.0f} GB"
    )
    several = found.num_devices > 1
    columns = COLUMNS + (OWNERS if several else ())
    shown = table(*columns, right=columns)
    for row in found.rows:
        shown.add_row(*cells(f"{row.context:,}", *_figures(found, row)))
    print_table(shown)
    if found.chosen is None:
        return say(advice(found))
    say(_assumed(found, found.chosen) + " Start it with:")
    settings = settings_of(found, found.chosen) | {"MARLAAS_BASE_MODELS": f"q={_from_anywhere(where)}"}
    say(f"  {start_command(settings, found.chosen.split.workers)}")


def _millions(number: int) -> str:
    return f"{number / 1e6:,.0f}" if number >= 10_000_000 else f"{number / 1e6:.2g}"


def _from_anywhere(where: str) -> str:
    """A folder's whole path; a name of the hub as it is."""
    return str(Path(where).absolute()) if Path(where).is_dir() else where


def start_command(settings: Mapping[str, str], workers: int, options: str = "") -> str:
    """A shell's line that starts everything with these settings and so many rollout workers."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return " ".join([*variables, typed(), "up"]) + (f" --rollout {workers}" if workers > 1 else "") + options


def _figures(found: Plan, row: PlannedRow) -> tuple[object, ...]:
    split, training = row.split, row.trainer.training
    memory = (f"{training.total / 1e9:.2f}", _num_again(found, row), f"{row.rollout.kv / 1e9:.2f}", row.rows)
    hours = _rounded(row.hours()) if row.rows else ""
    speeds = (f"{row.tokens_per_s:,.0f}", f"{row.trained_per_s:,.0f}") if row.rows else ("does not fit", "")
    owners = () if split.shared else (f"{split.workers} x {split.parallel}", split.ranks)
    return (*memory, *speeds, hours, *owners)


def _rounded(hours: float) -> str:
    return f"{hours:,.{1 if hours < 10 else 0}f}"


def _assumed(found: Plan, chosen: PlannedRow) -> str:
    lines = [
        "Each speed is of an engine or a trainer by itself, in rows of the whole context; docs/real-models.md says what is assumed.",
        f"hours: of {NAMED_RUN}, by themselves; --context plans for no more tokens than a job needs.",
    ]
    if found.device.gpu and found.memory.engine == "torch":
        lines.append("vLLM is expected to sample several times as fast: --engine vllm.")
    if found.in_turn:
        part = chosen.sampling_share
        lines.append(
            f"At a context of {chosen.context:,} a job samples {part:.0%} of its time and trains {1 - part:.0%}."
        )
    return " ".join(lines)


def settings_of(found: Plan, row: PlannedRow) -> dict[str, str]:
    """The settings with which services follow the plan."""
    vllm = found.memory.engine == "vllm"
    on_gpu = {"MARLAAS_ROLLOUT_DEVICE": "cuda", "MARLAAS_TRAINER_DEVICE": "cuda"} if found.device.gpu else {}
    settings = on_gpu | ({"MARLAAS_ENGINE": "vllm"} if vllm else {})
    if row.context >= LEAST_CONTEXT:  # else it is the model's own, which is served without
        settings["MARLAAS_MAX_CONTEXT"] = str(row.context)
    if vllm:
        settings["MARLAAS_VLLM_MAX_LORA_RANK"] = str(max_lora_rank(found.memory.rank))
    return settings | ({} if row.split.shared else _of_split(row.split)) | settings_for(row.memories)


def _of_split(split: DeviceSplit) -> dict[str, str]:
    """The settings that give each part its devices, and spread it over them."""
    settings = {
        "MARLAAS_DEVICES": f"rollout:{_devices(0, split.for_rollouts)},trainer:{_devices(split.for_rollouts, split.ranks)}"
    }
    if split.parallel > 1:
        settings["MARLAAS_VLLM_TENSOR_PARALLEL"] = str(split.parallel)
    if split.ranks > 1:
        settings["MARLAAS_TRAINER_RANKS"] = str(split.ranks)
    return settings


def _devices(first: int, number: int) -> str:
    return f"{first}-{first + number - 1}" if number > 1 else str(first)


def advice(found: Plan) -> str:
    """Names what may help where nothing fits."""
    if found.num_devices == 1 and found.memory.weights > found.device.memory:
        cause = "two copies of the weights are more than the memory"
    else:
        cause = f"beside the weights a context of {found.rows[0].context:,} does not fit"
    device = "more GPUs (--gpus), or larger ones" if found.device.gpu else "or a GPU (--gpu)"
    return f"nothing fits: {cause}. What may help: a smaller base model, a shorter --context, {device}."
