"""Reads `marlaas.json`, which a base model's folder may have: settings that MARLaaS alone knows.

{"learning_rate": 2e-5, "tool_format": "hermes"}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InvalidInput
from common.suggestions import did_you_mean, quoted
from common.text.model_folder import read_json
from common.text.tool_calls import ToolFormat


class OwnSettings(NamedTuple):
    """The fields of the file, with the defaults of those that it leaves out."""

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
        if fault := _fault(content):
            raise InvalidInput(f"{file}: {fault}")
        return cls(**content)


def _fault(content: Mapping[str, Any]) -> str:
    """The fault of a field that is unknown or unusable; "" if there is none."""
    rate, tools = content.get("learning_rate", 1), content.get("tool_format", "hermes")
    if unknown := sorted(content.keys() - set(OwnSettings._fields)):
        return f"unknown field {quoted(unknown[0])}{did_you_mean(unknown[0], OwnSettings._fields)}"
    if type(rate) not in (int, float) or not 0 < rate <= 1:
        return f"learning_rate must be a number above 0 and at most 1, not {quoted(rate)}"
    if tools not in ("hermes", "compact"):
        return f"tool_format must be 'hermes' or 'compact', not {quoted(tools)}"
    return ""
