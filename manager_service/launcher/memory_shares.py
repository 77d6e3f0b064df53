"""Chooses, for `marlaas up`, the served context and the workers' memory, where no setting does: by the memory at hand.

A small base model, whose whole context fits in the default memory for keys and values, has the services' defaults.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.families import unsupported
from common.models.footprint import ROWS_PART, cache_room
from common.models.host_memory import host_bytes
from common.settings import LEAST_CONTEXT, dtype_on, parse_base_models, parse_bytes, resolve_config
from common.text.model_folder import read_config
from manager_service.launcher.engines import CORE, MAX_LORA_RANK, Device, parse_gpu
from manager_service.launcher.fitting import FIRST_CONTEXT, LEAST_KV, RANK, Copies, Fit, SharedMemory, settings_for
from manager_service.launcher.gpus import Gpu, LocalWorker, Placement
from manager_service.launcher.settings import LocalSettings

SMALL = 1 << 30
"""Bytes of all copies of the base models, up to which the defaults do."""
SIZE_SETTINGS = {"MARLAAS_MAX_CONTEXT", "MARLAAS_ROLLOUT_KV_BYTES", "MARLAAS_VLLM_MEMORY_FRACTION"}
"""Whoever sets one of these answers for what fits."""
CHOOSE = "MARLAAS_MAX_CONTEXT, MARLAAS_ROLLOUT_KV_BYTES and MARLAAS_ROLLOUT_SHARE choose"


@dataclass(frozen=True, slots=True)
class Chosen:
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """Variables for all services."""
    lines: list[str] = field(default_factory=list[str])
    """Lines about them, for whoever starts the services."""


def choose(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    placement: Placement,
    gpus: Sequence[Gpu],
    free: Callable[[], int] = host_bytes,
) -> Chosen:
    """Chooses what the workers have, each on the GPUs of its placement, the others on the processor. One that serves several base
    models in turn has what the largest needs.

    A wrong setting or base model is left to its service, whose error says it. Raises InvalidInput where the copies of
    the base models do not fit together.
    """
    try:
        bases = _read(environment)
        largest = max(bases, key=lambda name: bases[name].shape.num_weights)
        workers = [worker if worker.base else worker._replace(base=largest) for worker in workers]
        own = max(base.shape.context for base in bases.values())
        wanted = int(environment.get("MARLAAS_MAX_CONTEXT", own))
        if wanted < LEAST_CONTEXT:
            return Chosen()
        memories = list(_memories(environment, workers, placement, gpus, bases, free))
    except (OSError, ValueError, KeyError, InvalidInput):
        return Chosen()
    lines = list[str]()
    if wanted > own:
        lines.append(f"MARLAAS_MAX_CONTEXT={wanted} is above {own}, the base model's own context, which is served")
    contexts = [min(wanted, own)] if "MARLAAS_MAX_CONTEXT" in environment else [*_contexts(own), own]
    longest = [_longest(memory, contexts, chosen=not SIZE_SETTINGS.isdisjoint(environment)) for memory in memories]
    served = min((fit.context if fit else 0 for fit in longest), default=0)
    if not served:
        return Chosen(lines=lines)
    fits = [(memory, memory.at(served)) for memory in memories]
    settings = ({"MARLAAS_MAX_CONTEXT": str(served)} if served < own else {}) | settings_for(fits)
    unset = {name: value for name, value in settings.items() if name not in environment}
    return Chosen(unset, [*lines, *(_line(memory, fit, own) for memory, fit in fits)])


def _contexts(end: int) -> list[int]:
    """1,024, 1,536, 2,048, 3,072, …"""
    doubled = [FIRST_CONTEXT << power for power in range(20)]
    return sorted(each for one in doubled for each in (one, one * 3 // 2) if each < end)


def _read(environment: Mapping[str, str]) -> dict[str, Copies]:
    """The base models by name, as on a processor. Raises ValueError, KeyError or InvalidInput for unknown sizes."""
    bases: dict[str, Copies] = {}
    backbone = environment.get("MARLAAS_TRAINER_BACKBONE")
    for name, where in parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny")).items():
        config = read_config(resolve_config(where))
        modules = backbone == "transformers" or (backbone != "decoder" and any(unsupported(config)))
        bases[name] = Copies(BaseShape.of(config), modules)
    return bases


def _memories(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    placement: Placement,
    gpus: Sequence[Gpu],
    bases: Mapping[str, Copies],
    free: Callable[[], int],
) -> Iterator[SharedMemory]:
    """The GPUs with their workers, and the machine with those on the processor, unless the memory is plenty."""
    for number, gpu in enumerate(gpus):
        placed = [worker for worker in workers if number in placement.get(worker.name, ())]
        if placed:
            device = parse_gpu(f"{gpu.memory / 1e9}GB")._replace(memory=gpu.free)
            yield from _reckoned(environment, f"GPU {number}", device, gpu.memory, _copies(placed, bases, gpu=True))
    on_cpu = [each for each in workers if environment.get(f"MARLAAS_{each.service.upper()}_DEVICE", "cpu") == "cpu"]
    if on_cpu:
        device = CORE._replace(memory=free())
        yield from _reckoned(environment, "this machine", device, device.memory, _copies(on_cpu, bases, gpu=False))


def _copies(workers: Sequence[LocalWorker], bases: Mapping[str, Copies], *, gpu: bool) -> list[Copies]:
    counts = Counter((worker.base, worker.service) for worker in workers)
    found = [
        Copies(base.shape, gpu or base.modules, counts[name, "rollout"], counts[name, "trainer"])
        for name, base in bases.items()
    ]
    return [copies for copies in found if copies.rollouts or copies.trainers]


def _reckoned(
    environment: Mapping[str, str], name: str, device: Device, whole: float, copies: Sequence[Copies]
) -> Iterator[SharedMemory]:
    """`whole`: bytes of the memory, of which vLLM's own setting names a part. Raises ValueError."""
    kv, share = environment.get("MARLAAS_ROLLOUT_KV_BYTES"), LocalSettings.of(environment).rollout_share
    vllm = environment.get("MARLAAS_ENGINE") == "vllm"
    rollouts, trainers = any(each.rollouts for each in copies), any(each.trainers for each in copies)
    if not (rollouts and trainers):
        share = None
    if vllm and device.gpu and rollouts:
        of_whole = float(environment.get("MARLAAS_VLLM_MEMORY_FRACTION", 0))
        share = share or of_whole * whole / max(1, device.memory) or None
    memory = SharedMemory(
        device=device,
        engine="vllm" if vllm else "torch",
        copies=copies,
        itemsizes=(_itemsize(environment, "ROLLOUT"), _itemsize(environment, "TRAINER")),
        parallel=int(environment.get("MARLAAS_VLLM_TENSOR_PARALLEL", 1)) if vllm and device.gpu else 1,
        ranks=int(environment.get("MARLAAS_TRAINER_RANKS", 1)) if device.gpu else 1,
        share=share,
        rank=int(environment.get("MARLAAS_VLLM_MAX_LORA_RANK", MAX_LORA_RANK)) if vllm else RANK,
        kv=parse_bytes(kv) if kv else None,
        name=name,
        whole=whole,
    )
    if memory.weights > SMALL or any(_is_long(copy.shape, memory) for copy in copies):
        yield memory


def _is_long(shape: BaseShape, memory: SharedMemory) -> bool:
    """Says whether the memory for keys and values, as chosen or by default, does not hold a row."""
    room = cache_room(int(ROWS_PART * (memory.kv or LEAST_KV)), shape.num_layers)
    return room < shape.context * shape.kv_bytes(memory.itemsizes[0])


def _itemsize(environment: Mapping[str, str], service: str) -> int:
    """Bytes of a weight, as the service's own settings have it."""
    chosen = environment.get(f"MARLAAS_{service}_DTYPE", "auto")
    dtype = dtype_on(environment.get(f"MARLAAS_{service}_DEVICE", "cpu")) if chosen == "auto" else chosen
    return 2 if dtype == "bfloat16" else 4


def _longest(memory: SharedMemory, contexts: Sequence[int], *, chosen: bool) -> Fit | None:
    """None where sizes that somebody has chosen do not fit by the arithmetic here. Raises InvalidInput."""
    if fit := memory.longest(contexts):
        return fit
    has, least = memory.device.memory, memory.least
    number = memory.rollouts + memory.trainers
    what = f"the base models do not fit in the memory of {memory.name}: {number} copies take {least / 1e9:.1f} GB"
    if least > has:
        raise InvalidInput(
            f"{what}, and it has {has / 1e9:.1f} GB; a smaller base model helps, fewer workers, or another device"
        )
    if chosen:
        return None
    raise InvalidInput(
        f"{what} of its {has / 1e9:.1f} GB, and what is left holds no context of {contexts[0]:,} tokens;"
        f" a smaller base model helps, fewer workers, another device, or a choice: {CHOOSE}"
    )


def _line(memory: SharedMemory, fit: Fit, own_context: int) -> str:
    parts = list[str]()
    if memory.rollouts:
        parts.append(f"{fit.rollout / 1e9:.1f} GB a rollout worker ({fit.kv / 1e9:.1f} of keys and values)")
    if memory.trainers:
        parts.append(f"{fit.trainer / 1e9:.1f} GB a trainer")
    context = f"context {fit.context:,}" + (f" of the model's {own_context:,}" if fit.context < own_context else "")
    return f"{context}; of the {memory.device.memory / 1e9:.1f} GB of {memory.name}: {', '.join(parts)}; {CHOOSE}"
