"""Chooses, for `marlaas up`, the context that is served and the memory of the workers, where nobody has: by the memory at hand.

A base model whose whole context fits in the default memory for keys and values, and that is small, has the services' own defaults.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.families import unsupported
from common.host_memory import host_bytes
from common.served_context import context_that_fits
from common.settings import dtype_on, parse_base_models, resolve_config
from common.text.model_folder import read_config
from manager_service.local.engines import Device, PlannedEngine
from manager_service.local.gpus import Gpu, LocalWorker, Seats
from manager_service.local.plan import FIRST_CONTEXT, MICRO_BATCH_TOKENS
from manager_service.local.settings import LocalSettings
from manager_service.local.sharing import LEAST_KV, Copies, Setup, WorkerBytes, fit, least_bytes

SMALL = 1 << 30
"""Bytes of all copies of the base models: less is not reckoned with."""
SIZES = {"MARLAAS_MAX_CONTEXT", "MARLAAS_ROLLOUT_KV_BYTES", "MARLAAS_VLLM_MEMORY_FRACTION"}
"""Settings by which somebody answers for what fits."""
CHOOSE = "MARLAAS_MAX_CONTEXT, MARLAAS_ROLLOUT_KV_BYTES and MARLAAS_ROLLOUT_SHARE choose"


@dataclass(frozen=True, slots=True)
class Chosen:
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """Variables for all services."""
    lines: list[str] = field(default_factory=list[str])
    """Tell of them."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A memory, and what is in it."""

    name: str  # "GPU 0", "this machine"
    copies: Sequence[Copies]
    setup: Setup
    whole: float  # bytes, with what others hold

    @property
    def memory(self) -> float:
        """Bytes that nobody holds."""
        return self.setup.device.memory

    @property
    def weights(self) -> float:
        """Bytes of all copies."""
        number = sum((copy.rollouts + copy.trainers) * copy.shape.num_weights for copy in self.copies)
        return number * self.setup.rollout_itemsize

    def has(self, service: str) -> bool:
        return any(copy.rollouts if service == "rollout" else copy.trainers for copy in self.copies)


def choose(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    seats: Seats,
    gpus: Sequence[Gpu],
    free: Callable[[], int] = host_bytes,
) -> Chosen:
    """Chooses what the workers have, each on the GPUs where it is seated, the others on the processor.

    What is wrong with a setting or a base model is left to the service that it is for, whose error says it. Raises InvalidInput where the
    copies of the base models do not fit beside each other.
    """
    try:
        bases = _read(environment)
        context = environment.get("MARLAAS_MAX_CONTEXT")
        given = None if context is None else int(context)
        places = list(_places(environment, workers, seats, gpus, bases, free))
    except (ValueError, KeyError, InvalidInput):
        return by_default(environment)
    small = not any(base.short for base in bases.values())
    places = [place for place in places if not small or place.weights > SMALL]
    own_context = max(base.shape.context for base in bases.values())
    contexts = [min(given, own_context)] if given else [*_contexts(own_context), own_context]
    chosen = not SIZES.isdisjoint(environment)
    fits = {place.name: _fitted(place, contexts, chosen=chosen) for place in places}
    served = min((each.context for each in fits.values() if each), default=0)
    if not served:
        return by_default(environment)
    together = [(place, each) for place in places if (each := fit(place.copies, place.setup, [served]))]
    settings = {name: value for name, value in _settings(together, own_context).items() if name not in environment}
    return Chosen(settings, [_line(place, each, own_context) for place, each in together])


def _contexts(end: int) -> list[int]:
    """1,024, 1,536, 2,048, 3,072, …"""
    doubled = [FIRST_CONTEXT << power for power in range(20)]
    return sorted(each for one in doubled for each in (one, one * 3 // 2) if each < end)


def by_default(environment: Mapping[str, str]) -> Chosen:
    """The context that the default memory for keys and values holds, or the one that is said; for memories and models whose sizes are
    not known here. What is wrong with a setting or a base model is left to the service that it is for, whose error says it."""
    if "MARLAAS_MAX_CONTEXT" in environment or environment.get("MARLAAS_ENGINE", "torch") != "torch":
        return Chosen()
    try:
        kv_bytes = int(environment.get("MARLAAS_ROLLOUT_KV_BYTES", LEAST_KV))
        bases = parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny"))
        folders = {name: resolve_config(where) for name, where in bases.items()}
    except (ValueError, InvalidInput):
        return Chosen()
    itemsize = _itemsize(environment, "ROLLOUT")
    short = {name: found for name, folder in folders.items() if (found := _short(folder, kv_bytes, itemsize))}
    if not short or min(fits for fits, _ in short.values()) == 0:
        return Chosen()
    name, (fits, own) = min(short.items(), key=lambda item: item[1][0])
    line = (
        f"context {fits:,} of the {own:,} tokens of {name!r}: what {kv_bytes / (1 << 30):.3g} GiB for keys and values hold;"
        " MARLAAS_ROLLOUT_KV_BYTES gives more memory, MARLAAS_MAX_CONTEXT chooses"
    )
    return Chosen({"MARLAAS_MAX_CONTEXT": str(fits)}, [line])


def above_all_contexts(environment: Mapping[str, str]) -> list[str]:
    """Tells, in a line, of a MARLAAS_MAX_CONTEXT above the own context of every base model; else nothing, as where something is wrong."""
    if "MARLAAS_MAX_CONTEXT" not in environment:
        return []
    try:
        given = int(environment["MARLAAS_MAX_CONTEXT"])
        own = max(base.shape.context for base in _read(environment).values())
    except (OSError, ValueError, KeyError, InvalidInput):
        return []
    said = f"MARLAAS_MAX_CONTEXT={given} is above {own}, the base model's own context, which is served"
    return [said] * (given > own)


def _short(folder: Path, kv_bytes: int, itemsize: int) -> tuple[int, int] | None:
    """See `context_that_fits`."""
    try:
        return context_that_fits(folder, kv_bytes, itemsize)
    except (InvalidInput, KeyError):  # a configuration that its service refuses by name
        return None


@dataclass(frozen=True, slots=True)
class LocalBase:
    """The sizes of a base model that count for memory."""

    shape: BaseShape
    modules: bool  # transformers' own compute it in the trainer
    short: bool  # the default memory for keys and values does not hold its context


def _read(environment: Mapping[str, str]) -> dict[str, LocalBase]:
    """The base models by name. Raises ValueError, KeyError or InvalidInput for a base model whose sizes are not known here."""
    found: dict[str, LocalBase] = {}
    for name, where in parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny")).items():
        folder = resolve_config(where)
        config = read_config(folder)
        backbone = environment.get("MARLAAS_TRAINER_BACKBONE")
        modules = backbone == "transformers" or (backbone != "decoder" and any(unsupported(config)))
        short = context_that_fits(folder, LEAST_KV, _itemsize(environment, "ROLLOUT")) is not None
        found[name] = LocalBase(BaseShape.of(config), modules, short)
    return found


def _setup(environment: Mapping[str, str], device: Device, whole: float) -> Setup:
    """`whole`: bytes of the memory, of which vLLM's own setting names a part. Raises ValueError."""
    kv, share = environment.get("MARLAAS_ROLLOUT_KV_BYTES"), LocalSettings.of(environment).rollout_share
    vllm = environment.get("MARLAAS_ENGINE") == "vllm"
    if vllm and device.gpu:
        of_whole = float(environment.get("MARLAAS_VLLM_MEMORY_FRACTION", 0))
        share = share or of_whole * whole / device.memory or None
    return Setup(
        device=device,
        engine=PlannedEngine.of("vllm" if vllm else "torch", device),
        rollout_itemsize=_itemsize(environment, "ROLLOUT"),
        trainer_itemsize=_itemsize(environment, "TRAINER"),
        parallel=int(environment.get("MARLAAS_VLLM_TENSOR_PARALLEL", 1)) if vllm and device.gpu else 1,
        ranks=int(environment.get("MARLAAS_TRAINER_RANKS", 1)) if device.gpu else 1,
        share=share,
        kv=int(kv) if kv and not (device.gpu and vllm) else None,
    )


def _itemsize(environment: Mapping[str, str], service: str) -> int:
    """Bytes of a weight, as the service's own settings have it."""
    chosen = environment.get(f"MARLAAS_{service}_DTYPE", "auto")
    dtype = dtype_on(environment.get(f"MARLAAS_{service}_DEVICE", "cpu")) if chosen == "auto" else chosen
    return 2 if dtype == "bfloat16" else 4


def _places(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    seats: Seats,
    gpus: Sequence[Gpu],
    bases: Mapping[str, LocalBase],
    free: Callable[[], int],
) -> Iterator[SharedMemory]:
    """The GPUs that are taken, each with its workers, and the machine with those that compute on the processor."""
    for number, gpu in enumerate(gpus):
        if copies := _copies([worker for worker in workers if number in seats.get(worker.name, ())], bases, gpu=True):
            setup = _setup(environment, Device(gpu.free, 0, 0), gpu.memory)
            yield SharedMemory(f"GPU {number}", copies, setup, gpu.memory)
    on_cpu = [each for each in workers if environment.get(f"MARLAAS_{each.service.upper()}_DEVICE", "cpu") == "cpu"]
    if copies := _copies(on_cpu, bases, gpu=False):
        memory = free()
        setup = _setup(environment, Device(memory, 0, 0, gpu=False), memory)
        yield SharedMemory("this machine", copies, setup, memory)


def _copies(workers: Sequence[LocalWorker], bases: Mapping[str, LocalBase], *, gpu: bool) -> list[Copies]:
    counts = Counter((worker.base, worker.service) for worker in workers)
    found = [
        Copies(base.shape, gpu or base.modules, counts[name, "rollout"], counts[name, "trainer"])
        for name, base in bases.items()
    ]
    return [copies for copies in found if copies.rollouts or copies.trainers]


def _fitted(place: SharedMemory, contexts: Sequence[int], *, chosen: bool) -> WorkerBytes | None:
    """None where sizes that somebody has chosen do not fit by the arithmetic here. Raises InvalidInput."""
    memory, found, least = (
        place.memory,
        fit(place.copies, place.setup, contexts),
        least_bytes(place.copies, place.setup),
    )
    if found is not None or (chosen and least <= memory):
        return found
    number = sum(copy.rollouts + copy.trainers for copy in place.copies)
    what = f"the base models do not fit in the memory of {place.name}: {number} copies take {least / 1e9:.1f} GB"
    if least > memory:
        raise InvalidInput(
            f"{what}, and it has {memory / 1e9:.1f} GB; a smaller base model helps, fewer workers, or another device"
        )
    raise InvalidInput(
        f"{what} of its {memory / 1e9:.1f} GB, and what is left holds no context of {contexts[0]:,} tokens;"
        f" a smaller base model helps, fewer workers, another device, or a choice: {CHOOSE}"
    )


def _settings(fits: Sequence[tuple[SharedMemory, WorkerBytes]], own_context: int) -> dict[str, str]:
    """For all services, so what every place holds."""
    served = min(each.context for _, each in fits)
    found = {"MARLAAS_MAX_CONTEXT": str(served)} if served < own_context else {}
    rollouts = [(place, each) for place, each in fits if place.has("rollout")]
    if on_gpu := [
        (place, each) for place, each in rollouts if place.setup.device.gpu and place.setup.engine.name == "vllm"
    ]:
        if any(place.has("trainer") or sum(copy.rollouts for copy in place.copies) > 1 for place, _ in on_gpu):
            part = min(each.rollout / place.whole for place, each in on_gpu)
            found["MARLAAS_VLLM_MEMORY_FRACTION"] = f"{int(part * 100) / 100:.2f}"
    elif rollouts:
        found["MARLAAS_ROLLOUT_KV_BYTES"] = str(min(each.kv for _, each in rollouts))
    both = [each for place, each in fits if place.has("rollout") and place.has("trainer")]
    if both:
        found["MARLAAS_TRAINER_MEMORY_BYTES"] = str(min(each.activations for each in both))
        found["MARLAAS_TRAINER_CACHE_BYTES"] = str(min(each.cache for each in both))
    if any(place.setup.device.gpu and place.has("rollout") and place.has("trainer") for place, _ in fits):
        found["MARLAAS_TRAINER_MICRO_BATCH_TOKENS"] = str(max(MICRO_BATCH_TOKENS, served))
    if any(each.checkpointed and place.has("trainer") and not place.setup.device.gpu for place, each in fits):
        found["MARLAAS_TRAINER_CHECKPOINTING"] = "true"
    return found


def _line(place: SharedMemory, each: WorkerBytes, own_context: int) -> str:
    parts = [f"{each.rollout / 1e9:.1f} GB a rollout worker ({each.kv / 1e9:.1f} of keys and values)"] * place.has(
        "rollout"
    )
    parts += [f"{each.trainer / 1e9:.1f} GB a trainer"] * place.has("trainer")
    context = f"context {each.context:,}" + (f" of the model's {own_context:,}" if each.context < own_context else "")
    return f"{context}; of the {place.memory / 1e9:.1f} GB of {place.name}: {', '.join(parts)}; {CHOOSE}"
