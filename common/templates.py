"""Templates of graders, such as `{{item.x}}` and `{{sample.output_text}}`, as in OpenAI's API. Executes nothing.

item                    the row of the training file; `item.a.b` goes into objects, `item.a.0` into lists
sample.output_text      the model's last turn
sample.output_json      that text parsed as JSON
sample.output_tools     the tool calls of that turn, in OpenAI's form
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidInput
from common.spelling import nearest

SAMPLE_FIELDS = ("output_text", "output_json", "output_tools")

_VARIABLE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*")


def variables(template: str) -> list[str]:
    """The variables of a template in order, such as `item.answer`.

    Raises InvalidInput for one that is malformed, or that no item and no sample can have.
    """
    names = [match.group(1).strip() for match in _VARIABLE.finditer(template)]
    for name in names:
        _check(name)
    return names


def render(template: str, item: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """The template with its variables replaced: strings as they are, other values as JSON.

    Raises InvalidInput, naming the variable, if the item or the sample does not have it.
    """
    return _VARIABLE.sub(lambda match: _text(lookup(match.group(1).strip(), item, sample)), template)


def lookup(name: str, item: Mapping[str, Any], sample: Mapping[str, Any]) -> Any:
    """The value of one variable. Raises InvalidInput."""
    _check(name)
    root, *path = name.split(".")
    value: Any = item if root == "item" else sample
    for depth, key in enumerate(path, 1):
        value = _child(value, key, ".".join([root, *path[:depth]]))
    return value


def _check(name: str) -> None:
    if not _PATH.fullmatch(name):
        raise InvalidInput(f"{{{{{name}}}}} is not a variable: write item.name or sample.output_text")
    root, *path = name.split(".")
    if root not in ("item", "sample"):
        raise InvalidInput(f"unknown variable {{{{{name}}}}}: a variable begins with item or sample")
    if not path:
        raise InvalidInput(f"{{{{{name}}}}} names no field: write {{{{{root}.name}}}}")
    if root == "sample" and path[0] not in SAMPLE_FIELDS:
        near = nearest(path[0], SAMPLE_FIELDS, likeness=0.0)
        raise InvalidInput(f"unknown variable {{{{{name}}}}}: did you mean {{{{sample.{near}}}}}?")


def _child(value: Any, key: str, name: str) -> Any:
    children: Any = value
    if isinstance(value, Mapping) and key in value:
        return children[key]
    if isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(children):
        return children[int(key)]
    if name.startswith("sample.output_json") and value is None:
        raise InvalidInput("{{sample.output_json}}: the output is not JSON")
    raise InvalidInput(f"{{{{{name}}}}}: there is no such field")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
