"""Templates of graders, such as `{{item.x}}` and `{{sample.output_text}}`, as in OpenAI's API. Executes nothing.

item                    the row of the training file; `item.a.b` goes into objects, `item.a.0` into lists
sample.output_text      the model's last turn
sample.output_json      that text parsed as JSON
sample.output_tools     the tool calls of that turn, in OpenAI's form
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from common.errors import InvalidInput
from common.suggestions import nearest

SAMPLE_FIELDS = ("output_text", "output_json", "output_tools")

MAX_TEMPLATE_CHARACTERS = 64 * 1024
MAX_CACHED_TEMPLATES = 1024
"""Templates and variables whose words are cached."""
MAX_NAME_CHARACTERS = 256
"""Characters of one variable."""
MAX_TEXT_CHARACTERS = 2 * 1024 * 1024
"""Characters of a rendered template: a short template may name a long field often."""

_PATH = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*")


def variables(template: str) -> list[str]:
    """The variables of a template in order, such as `item.answer`.

    Raises InvalidInput for one that is malformed, or that no item and no sample can have.
    """
    names = [name for _, name in _pieces(template) if name is not None]
    for name in set(names):
        _check(name)
    return names


def render(template: str, item: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """The template with its variables replaced: strings as they are, other values as JSON.

    Raises InvalidInput, naming a variable that the item or the sample lacks, or for a text above MAX_TEXT_CHARACTERS.
    """
    text = _joined(_pieces(template), item, sample, MAX_TEXT_CHARACTERS)
    if text is None:
        raise InvalidInput(f"the template makes a text of more than {MAX_TEXT_CHARACTERS} characters")
    return text


def render_short(template: str, item: Mapping[str, Any], sample: Mapping[str, Any], *, most: int) -> str | None:
    """The same, if fast: None if the template or the text exceeds `most` characters, or for an object or a list."""
    return _joined(_cached_pieces(template), item, sample, most, flat=True) if len(template) <= most else None


def _joined(
    pieces: Iterable[tuple[str, str | None]],
    item: Mapping[str, Any],
    sample: Mapping[str, Any],
    most: int,
    *,
    flat: bool = False,
) -> str | None:
    """None if the text exceeds `most` characters; if `flat`, also if a variable is an object or a list."""
    parts, size = list[str](), 0
    for text, name in pieces:
        value = "" if name is None else lookup(name, item, sample)
        if flat and isinstance(value, dict | list | tuple):
            return None
        parts += (text, _text(value))
        size += len(text) + len(parts[-1])
        if size > most:
            return None
    return "".join(parts)


def _pieces(template: str) -> Iterator[tuple[str, str | None]]:
    """(text, the variable after it) from the beginning to the end; None after the last text."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidInput(f"a template has at most {MAX_TEMPLATE_CHARACTERS} characters, not {len(template)}")
    at = 0
    while (start := template.find("{{", at)) >= 0 and (end := template.find("}}", start + 2)) >= 0:
        yield template[at:start], template[start + 2 : end].strip()
        at = end + 2
    yield template[at:], None


@lru_cache(MAX_CACHED_TEMPLATES)
def _cached_pieces(template: str) -> tuple[tuple[str, str | None], ...]:
    return tuple(_pieces(template))


def lookup(name: str, item: Mapping[str, Any], sample: Mapping[str, Any]) -> Any:
    """The value of one variable. Raises InvalidInput."""
    root, *path = _check(name)
    value: Any = item if root == "item" else sample
    for depth, key in enumerate(path, 1):
        value = _child(value, key, root, path[:depth])
    return value


@lru_cache(MAX_CACHED_TEMPLATES)
def _check(name: str) -> tuple[str, ...]:
    """The words of a variable. Raises InvalidInput."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidInput(f"a variable's name has at most {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if not _PATH.fullmatch(name):
        raise InvalidInput(f"{{{{{name}}}}} is not a variable: write item.name or sample.output_text")
    root, *path = name.split(".")
    if root not in ("item", "sample"):
        raise InvalidInput(f"unknown variable {{{{{name}}}}}: a variable begins with item or sample")
    if not path:
        raise InvalidInput(f"{{{{{name}}}}} names no field: write {{{{{root}.name}}}}")
    if root == "sample" and path[0] not in SAMPLE_FIELDS:
        near = nearest(path[0], SAMPLE_FIELDS, likeness=0.0) or SAMPLE_FIELDS[0]
        raise InvalidInput(f"unknown variable {{{{{name}}}}}: did you mean {{{{sample.{near}}}}}?")
    return root, *path


def _child(value: Any, key: str, root: str, path: Sequence[str]) -> Any:
    if isinstance(value, dict | Mapping) and key in value:
        return value[key]
    if isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    name = ".".join([root, *path])
    if name.startswith("sample.output_json") and value is None:
        raise InvalidInput("{{sample.output_json}}: the output is not JSON")
    raise InvalidInput(f"{{{{{name}}}}}: there is no such field")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
