"""Reads the text files of a base model's folder. Every function raises ValueError, naming a missing or unusable file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.text.tool_calls import ToolFormat

RATE, RATE_WIDTH = 1e-4, 1024


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
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json must give {key}, a positive number; it gives {value!r}")
    return value


def usual_learning_rate(config: Mapping[str, Any]) -> float:
    """The RL rate of adapters on a base model that has none in `marlaas.json`: it falls with the square root of the model's width."""
    return RATE * math.sqrt(RATE_WIDTH / config.get("hidden_size", RATE_WIDTH))


def tool_format(name: Any) -> ToolFormat:
    if name in ("hermes", "compact"):
        return name
    raise ValueError(f"marlaas.json: tool_format must be 'hermes' or 'compact', not {name!r}")
