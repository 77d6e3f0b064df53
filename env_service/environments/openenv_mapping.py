"""Maps a model's turns to an OpenEnv environment's actions and back, by the schemas that its server tells.

action with one text that it must have            the model's text is that text
any other action                                  the model calls the tool `act`, whose parameters are the action's
action that calls tools (`CallToolAction`, MCP)   the model calls the environment's tools
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from env_service.environments.openenv_server import MAX_TOLD, Schemas
from env_service.failures import EnvironmentFailed

ACT = "act"
MAX_SHOWN = 64 * 1024
"""Characters of an observation that the model is shown."""
MAX_TOOLS_BYTES = 64 * 1024
Definition = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ActionShape:
    """The form in which an environment wants its actions."""

    text_field: str = ""
    """The one that takes the model's text; "": the model calls tools."""
    asks_for_tools: bool = False
    """The session tells its tools, and takes calls of them."""
    tools: Sequence[Definition] = ()


def shape_of(schemas: Schemas) -> ActionShape:
    """Raises EnvironmentFailed for a schema that is no object's."""
    action = schemas.action
    fields: Any = action.get("properties")
    if not isinstance(fields, dict):
        raise EnvironmentFailed("the OpenEnv server's schema of actions has no properties")
    names = [name for name in fields if name != "metadata"]
    if "tool_name" in names and fields.get("type", {}).get("default") == "call_tool":
        return ActionShape(asks_for_tools=True)
    must = [name for name in names if name in action.get("required", ())] or names
    if len(must) == 1 and fields[must[0]].get("type") == "string" and "enum" not in fields[must[0]]:
        return ActionShape(text_field=must[0])
    parameters = {**action, "properties": {name: fields[name] for name in names}}
    return ActionShape(tools=(definition(ACT, str(action.get("description", "")), parameters),))


def definition(name: str, description: str, parameters: Mapping[str, Any]) -> Definition:
    """The definition of a tool, in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools_told(observation: Mapping[str, Any]) -> list[Definition]:
    """The tools in the answer to `list_tools`. Raises EnvironmentFailed."""
    if (size := len(msgspec.json.encode(observation))) > MAX_TOOLS_BYTES:
        raise EnvironmentFailed(f"the OpenEnv server's tools have {size} bytes, more than {MAX_TOOLS_BYTES}")
    try:
        return [definition(tool["name"], tool["description"], tool["input_schema"]) for tool in observation["tools"]]
    except (LookupError, TypeError) as error:
        raise EnvironmentFailed("the OpenEnv server does not tell its tools") from error


def shown(observation: Mapping[str, Any], field: str = "") -> str:
    """The part of an observation that the model sees: a field, its only text, or all of it as JSON. Raises EnvironmentFailed."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if field and field not in fields:
        raise EnvironmentFailed(f"the observation has no {field!r}; it has {', '.join(fields)}"[:MAX_TOLD])
    if field or len(fields) == 1:
        fields = {"": fields[field] if field else next(iter(fields.values()))}
    value = fields.get("", fields)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode() if fields else ""
    if len(text) > MAX_SHOWN:
        raise EnvironmentFailed(f"the observation has {len(text)} characters, more than {MAX_SHOWN}")
    return text


def shown_result(observation: Mapping[str, Any]) -> str:
    """The part of a tool's result that the model sees."""
    if (error := observation.get("error")) is not None:
        return "error: " + shown({"": error})
    result = observation.get("result")
    return shown({"": result.get("data", result) if isinstance(result, dict) else result})
