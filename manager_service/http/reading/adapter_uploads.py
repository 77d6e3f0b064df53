"""Adapters that tenants upload, in PEFT's form: `adapter_model.safetensors`, and the text of `adapter_config.json`.

What could run code, hide something or be read in two ways is refused by name. Pure functions, which raise InvalidInput.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from common.errors import InvalidInput
from common.models.base_digest import DIGEST_FIELD
from common.models.weight_files import StoredTensor, parse_header
from common.suggestions import cut, quoted
from common.wire.messages import LoraSpec
from manager_service.http.openai.jobs.hyperparameters import Hyperparameters
from manager_service.http.reading.json_values import parse_json
from manager_service.records.file_records import UploadedAdapter

MAX_HEADER, MAX_CONFIG, MAX_DIGEST = 1 << 20, 64 << 10, 128
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".zip")
PICKLED = (b"\x80", b"PK\x03\x04")
"""First bytes of pickles, and of the archives that torch keeps them in."""
EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
"""For each dtype, the integer that has a number's bits, and those that all are 1 if it is not finite."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # others change the base's weights
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Values that change nothing, of fields that have some besides none."""
HARMLESS = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern"),
    *("ensure_weight_tying", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "megatron_core", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", DIGEST_FIELD),
}
"""Fields of which the adapter's numbers do not depend, once they are there. Any other must say nothing."""

_FACTOR = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,3})\.((?:\w{1,64}\.){0,8}\w{1,64})\.lora_([AB])\.weight",
    re.ASCII,
)


class FoundAdapter(msgspec.Struct, frozen=True):
    """An adapter, and how its numbers are stored."""

    adapter: UploadedAdapter
    dtype: str


def refuse_pickle(name: str, start: bytes) -> None:
    """Raises InvalidInput for a file that is read by running what is in it."""
    if name.lower().endswith(PICKLES) or start.startswith(PICKLED):
        raise _wrong(
            f"{quoted(name)} is a pickle or an archive, which can run code when it is read: send adapter_model.safetensors,"
            " as save_pretrained writes it"
        )


def header_bytes(start: bytes, size: int) -> int:
    """The size of the header of a safetensors file that begins so, with the eight bytes before it."""
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise _wrong(
            f"this is no safetensors file: its header would have {length} bytes, and at most {MAX_HEADER} are read"
        )
    return 8 + length


def read_adapter(header: bytes, size: int, config: str) -> FoundAdapter:
    """`header`: with the eight bytes before it. `size`: of the whole file."""
    try:
        tensors = parse_header(header[8:], size)
    except ValueError as error:
        raise _wrong(f"this is no safetensors file: {error}") from error
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= EXPONENTS.keys():
        raise _wrong(f"all factors must have one dtype of {', '.join(EXPONENTS)}")
    rank, alpha, digest = _config(config)
    shapes, num_layers = _shapes(tensors, rank)
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    lora = LoraSpec(rank, alpha, tuple(targets))
    return FoundAdapter(UploadedAdapter(lora, shapes, num_layers, digest), dtypes.pop())


def check_finite(content: bytes, dtype: str) -> None:
    """Raises InvalidInput for numbers that are none."""
    bits, exponent = EXPONENTS[dtype]
    if bool(((np.frombuffer(content, bits) & exponent) == exponent).any()):
        raise _wrong("the adapter holds NaN or infinity: all its numbers must be finite")


def _config(text: str) -> tuple[int, float, str]:
    """(rank, alpha, digest of its base model)."""
    try:
        if len(text) > MAX_CONFIG:
            raise ValueError(f"{len(text)} characters; at most {MAX_CONFIG} are read")
        config = parse_json(text.encode())
        if not isinstance(config, dict):
            raise ValueError("must be a JSON object")
    except (ValueError, RecursionError) as error:
        raise _wrong(f"adapter_config: {error}", "adapter_config") from error
    says = {name: config.get(name) for name in (*NEUTRAL, *config) if name not in HARMLESS}
    for name, value in says.items():
        if value not in NEUTRAL[name] if name in NEUTRAL else value:
            told = (
                f"adapter_config: {cut(name)} {quoted(value)} is not offered: it may change what the adapter computes"
            )
            raise _wrong(told, "adapter_config")
    rank, alpha, digest = config.get("r"), config.get("lora_alpha"), config.get(DIGEST_FIELD) or ""
    if not isinstance(digest, str) or len(digest) > MAX_DIGEST:
        raise _wrong(f"adapter_config: {DIGEST_FIELD} {quoted(digest)} is no digest: leave it out", "adapter_config")
    try:
        given = Hyperparameters.model_validate({"lora_rank": rank, "lora_alpha": alpha})
    except ValueError as error:
        raise _wrong(
            f"adapter_config: r {quoted(rank)} or lora_alpha {quoted(alpha)} is out of range", "adapter_config"
        ) from error
    return given.lora_rank, given.lora_alpha, digest


def _shapes(tensors: Sequence[StoredTensor], rank: int) -> tuple[dict[str, tuple[int, int]], int]:
    """(out, in) by the name of a module within a layer, and the number of layers. Each must have all modules."""
    widths: dict[tuple[str, str], int] = {}
    seen: set[tuple[str, str, int]] = set()
    for tensor in tensors:
        found = _FACTOR.fullmatch(tensor.name)
        if found is None:
            raise _wrong(f"{quoted(tensor.name)} is no factor of a layer's adapter, lora_A or lora_B")
        layer, module, side = int(found[1]), found[2], found[3]
        shape = tensor.shape if side == "A" else tensor.shape[::-1]  # [R, width]
        if len(shape) != 2 or shape[0] != rank or shape[1] != widths.setdefault((module, side), shape[1]):
            raise _wrong(
                f"{quoted(tensor.name)} has the shape {quoted(tensor.shape)}: r is {rank}, and layers must be alike"
            )
        seen.add((module, side, layer))
    modules = sorted({module for module, _ in widths})
    num_layers = 1 + max((layer for _, _, layer in seen), default=-1)
    if not tensors or len(seen) != len(tensors) or len(modules) > 64 or len(seen) != 2 * len(modules) * num_layers:
        raise _wrong("every layer from 0 on must have lora_A and lora_B of the same modules, once")
    return {module: (widths[module, "B"], widths[module, "A"]) for module in modules}, num_layers


def _wrong(message: str, param: str = "file") -> InvalidInput:
    return InvalidInput(message, param=param, code="invalid_file")
