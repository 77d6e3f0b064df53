"""Reads the text files of a base model's folder. Raises ValueError, naming the file, or InvalidInput as said below."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InvalidInput
from common.suggestions import did_you_mean, quoted
from common.text.tool_calls import ToolFormat

RATE, RATE_WIDTH = 1e-4, 1024
SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Fields of a configuration that are positive whole numbers where they are given."""
NUMBERS = ("rms_norm_eps", "rope_theta")
ROPES = ("rope_scaling", "rope_parameters")
ROPE_NUMBERS = ("rope_theta", "factor")
TABLES = ("text_config", "rope_scaling", "rope_parameters", "quantization_config")


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A condition on a field of a configuration, where it is given."""

    what: str
    holds: Callable[[Any], bool]


TABLE = FieldKind("a table", lambda value: isinstance(value, Mapping))
SIZE = FieldKind("a positive number", lambda value: type(value) is int and value > 0)
NUMBER = FieldKind("a positive number", lambda value: type(value) in (int, float) and 0 < value < math.inf)
NAME = FieldKind("a name", lambda value: isinstance(value, str))
NAMES = FieldKind("a list of names", lambda value: isinstance(value, list) and all(map(NAME.holds, value)))


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the base model at {file.parent} has no readable {file.name}") from error


def read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.exists():
        return {}
    try:
        content = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """A base model's `config.json`, checked by `check_config`. Raises InvalidInput, naming the folder."""
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    try:
        check_config(config)
    except ValueError as error:
        raise InvalidInput(f"{folder}: {error}") from error
    return config


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming each fault: sizes that are not positive integers, uneven heads, other wrong values."""
    if found := [*_faults(config)]:
        raise ValueError(f"config.json must give {'; '.join(found)}")


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    faults = [*_odd(config, TABLES, TABLE)]
    yield from faults
    text = config if faults else config.get("text_config") or config
    odd = [*_odd(text, SIZES, SIZE)]
    yield from odd
    yield from _odd(text, NUMBERS, NUMBER)
    for rope in (text.get(name) for name in ROPES):
        yield from _odd(rope if isinstance(rope, Mapping) else {}, ROPE_NUMBERS, NUMBER)
    yield from _odd(text, ("model_type",), NAME)
    yield from _odd(text, ("layer_types",), NAMES)
    if not odd:
        yield from _uneven(text)


def _uneven(config: Mapping[str, Any]) -> Iterator[str]:
    """Faults of sizes that do not share out evenly."""
    hidden, heads, groups = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads and groups and heads % groups:
        yield f"num_key_value_heads that divide num_attention_heads; it gives {groups} and {heads}"
    if heads and hidden and not config.get("head_dim") and hidden % heads:
        yield f"head_dim, or num_attention_heads that divide hidden_size; it gives {heads} and {hidden}"


def _odd(config: Mapping[str, Any], names: Iterable[str], wanted: FieldKind) -> Iterator[str]:
    """The fields that a configuration gives otherwise than wanted."""
    for name in names:
        if (value := config.get(name)) is not None and not wanted.holds(value):
            yield f"{name}, {wanted.what}; it gives {value!r}"


def read_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(f"the base model at {folder} has no chat template: chat_template.jinja is missing")
    return template


def positive(config: Mapping[str, Any], key: str) -> int:
    if not SIZE.holds(value := config.get(key)):
        raise ValueError(f"config.json must give {key}, a positive number; it gives {value!r}")
    return config[key]


def usual_learning_rate(config: Mapping[str, Any]) -> float:
    """The RL rate of adapters without one in `marlaas.json`: it falls with the square root of the model's width."""
    return RATE * math.sqrt(RATE_WIDTH / config.get("hidden_size", RATE_WIDTH))


class OwnSettings(NamedTuple):
    """The fields of `marlaas.json` in a base model's folder: `{"learning_rate": 2e-5, "tool_format": "hermes"}`."""

    learning_rate: float | None = None
    """The rate of a job that names none; None: one by the model's width."""
    tool_format: ToolFormat = "hermes"

    @classmethod
    def load(cls, folder: Path) -> "OwnSettings":
        """Raises InvalidInput, naming the file, for unknown fields and unusable values."""
        file = folder / "marlaas.json"
        try:
            content = read_json(file, optional=True)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if fault := _own_fault(content):
            raise InvalidInput(f"{file}: {fault}")
        return cls(**content)


def _own_fault(content: Mapping[str, Any]) -> str:
    """The fault of a field that is unknown or unusable; "" if there is none."""
    rate, tools = content.get("learning_rate", 1), content.get("tool_format", "hermes")
    if unknown := sorted(content.keys() - set(OwnSettings._fields)):
        return f"unknown field {quoted(unknown[0])}{did_you_mean(unknown[0], OwnSettings._fields)}"
    if type(rate) not in (int, float) or not 0 < rate <= 1:
        return f"learning_rate must be a number above 0 and at most 1, not {quoted(rate)}"
    if tools not in ("hermes", "compact"):
        return f"tool_format must be 'hermes' or 'compact', not {quoted(tools)}"
    return ""
