"""Environments as data: checks the names and arguments that users give. The env service runs them.

    single_turn     one answer, one grader
    calculator      the tool `calculator`; makes its own items if it is given none
    search          the tool `search` over a text collection
    python          the tool `python`, in the sandbox
    openenv         sessions at an OpenEnv server, which gives the rewards

Operators install more as packages, in the entry point group `marlaas.environments`. An entry point names a class with
`reset(item, seed)` and `step(state, turn)` (see `env_service/environment.py`), built with the user's args as keyword
arguments; users see its ValueErrors. Before work is queued, the args' names are checked; with an attribute `Args`, a pydantic
model, their values too. Of replies in other roles than `tool`, an attribute `reply_roles` says which, such as ("user",
"system"): a base whose chat template cannot show them is then refused. Without it each trajectory fails, with the reason.
"""

import asyncio
import importlib
import inspect
import os
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import msgspec
from pydantic import BaseModel, Field, model_validator

from common.cancellation import beating
from common.errors import InvalidInput
from common.outgoing import check_base, check_url
from common.suggestions import cut, did_you_mean, quoted
from common.tasks.graders import Declared, Grader, parse, validate_grader
from common.text.tokens import REPLY_ROLES, ChatTokenizer
from common.wire.messages import EnvSpec

ENTRY_POINTS = "marlaas.environments"

SUPERVISED = "supervised"
"""The environment of a supervised job, whose rows nobody samples. No job can name it, no package install it."""

MAX_INLINE_CHARACTERS = 64 * 1024
"""Documents given in the arguments travel in every message; larger collections belong into a folder."""

MAX_ARGS_BYTES = 64 * 1024
"""Bytes of the arguments of an environment that is installed, or a server."""

IMPORT_S = 120.0
"""The longest time in which a package may be imported."""

GraderArgs = dict[str, Any]


class SingleTurnArgs(Declared):
    grader: GraderArgs


class CalculatorArgs(Declared):
    grader: GraderArgs | None = None
    """None: the answer must be exactly the item's `answer`."""
    skill: Literal["calc", "add", "max"] = "calc"
    """The kind of questions that it makes when the job has no training file."""


class Document(Declared):
    text: str
    id: str = ""
    """Shown before the text, if it is not empty."""


class SearchArgs(Declared):
    grader: GraderArgs | None = None
    """None: the `math` grader, which also compares words, against the item's `answer`."""
    collection: str = ""
    """A file (.jsonl with `text` and `id`, or .txt) or a folder of them, below the operator's collections folder."""
    documents: tuple[Document, ...] = Field((), strict=False, fail_fast=True)
    """The collection itself, if it is small."""
    top_k: int = Field(3, ge=1, le=20)
    max_characters: int = Field(200, ge=20, le=4000)
    """The most characters of each result."""

    @model_validator(mode="after")
    def _one_source(self) -> "SearchArgs":
        if bool(self.collection) == bool(self.documents):
            raise ValueError("give either collection or documents")
        if sum(len(document.text) for document in self.documents) > MAX_INLINE_CHARACTERS:
            raise ValueError(f"documents have more than {MAX_INLINE_CHARACTERS} characters; use a collection")
        return self


class PythonArgs(Declared):
    grader: GraderArgs | None = None
    """None: the `math` grader against the item's `answer`."""
    max_output_characters: int = Field(2000, ge=20, le=20000)


class OpenEnvArgs(Declared):
    url: str = ""
    """The server's address, `http://host:8000`, of a host that the operator allows."""
    server: str = ""
    """The name of one of the operator's servers."""
    system: str = ""
    """A system message in front of each conversation."""
    reset: dict[str, Any] = {}
    """Arguments of each reset, besides the seed and the item's fields."""
    observation_field: str = ""
    """The field of an observation that the model sees; by default its only one, or all as JSON."""

    @model_validator(mode="after")
    def _one_server(self) -> "OpenEnvArgs":
        if bool(self.url) == bool(self.server):
            raise ValueError("give either url or server")
        if self.url:
            try:
                check_url(self.url)
                check_base(self.url)
            except ValueError as error:
                raise ValueError(f"url {error}") from error
        return self


BUILT_IN: dict[str, type[Declared]] = {
    "single_turn": SingleTurnArgs,
    "calculator": CalculatorArgs,
    "search": SearchArgs,
    "python": PythonArgs,
    "openenv": OpenEnvArgs,
}

DEFAULT_GRADERS: dict[str, dict[str, Any]] = {
    "calculator": {
        "type": "string_check",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    },
    "search": {"type": "math"},
    "python": {"type": "math"},
}

WITH_TOOLS = ("calculator", "search", "python")
"""The environments with tools that the model must be told of."""

TOOL_REPLIES = ("tool",)
"""Roles of an environment's messages, unless it says others."""

MAKES_ITEMS = ("calculator", "openenv")
"""The environments that need no training file."""

LIVE = ("openenv",)
"""The environments of live sessions, without a grader. Their sessions name the tools and replies."""


def validate_environment(spec: EnvSpec, *, param: str = "environment") -> None:
    """Raises InvalidInput naming the unknown environment or field and the nearest valid one."""
    if spec.name not in BUILT_IN:
        _validate_installed(spec, param)
        return
    parse_args(spec, param=param)
    grader_of(spec, param=param)
    if spec.name in LIVE:
        _check_size(spec, param)


def parse_args(spec: EnvSpec, *, param: str = "environment") -> Declared:
    """The arguments of a built-in environment. Raises InvalidInput."""
    return parse(BUILT_IN[spec.name], spec.args, param=f"{param}.args")


def grader_of(spec: EnvSpec, *, param: str = "environment") -> Grader | None:
    """The grader of a built-in environment, or its default; else None. Raises InvalidInput."""
    if spec.name not in BUILT_IN or spec.name in LIVE:
        return None
    grader: Any = spec.args.get("grader") or DEFAULT_GRADERS.get(spec.name)
    where = f"{param}.args.grader"
    if not isinstance(grader, Mapping):
        raise InvalidInput(f"{where} is missing", param=where)
    return validate_grader(cast(Mapping[str, Any], grader), param=where)


def grader_in(spec: EnvSpec) -> Mapping[str, Any] | None:
    """The grader among a valid environment's arguments; None: there is none that this service runs."""
    grader: Any = spec.args.get("grader") if spec.name in BUILT_IN else None
    return cast(Mapping[str, Any], grader) if isinstance(grader, Mapping) else None


def is_multi_turn(spec: EnvSpec) -> bool:
    return spec.name not in ("single_turn", SUPERVISED)


def wants_tools(spec: EnvSpec) -> bool:
    """True if the model must be told of tools; an installed environment's class says so by an attribute `tools`."""
    if spec.name in (*BUILT_IN, SUPERVISED):
        return spec.name in WITH_TOOLS
    return bool(getattr(load_installed(spec.name), "tools", ()))


def reply_roles(spec: EnvSpec) -> tuple[str, ...]:
    """Roles of the replies to model turns, or an installed class's `reply_roles`. Raises InvalidInput."""
    if not is_multi_turn(spec) or spec.name in LIVE:
        return ()
    if spec.name in BUILT_IN:
        return TOOL_REPLIES
    return roles_of(load_installed(spec.name))


def roles_of(environment: Any) -> tuple[str, ...]:
    """The roles that an environment, or its class, says. Raises InvalidInput."""
    roles: Any = getattr(environment, "reply_roles", TOOL_REPLIES)
    if isinstance(roles, str) or not isinstance(roles, Sequence) or any(role not in REPLY_ROLES for role in roles):
        raise InvalidInput(f"the environment's reply_roles must be a list of {', '.join(REPLY_ROLES)}")
    return tuple(cast(Sequence[str], roles))


def reply_fault(tokenizer: ChatTokenizer, roles: Sequence[str]) -> str:
    """The reason why a base model cannot show messages of these roles, perhaps only without a user's; else ""."""
    shapes = [("system", "user") if role == "system" and "user" in roles else (role,) for role in roles]
    return next(filter(None, map(tokenizer.reply_fault, shapes)), "")


def makes_items(spec: EnvSpec) -> bool:
    """True if the environment can make its own items, so that the job needs no training file."""
    if spec.name in (*BUILT_IN, SUPERVISED):
        return spec.name in MAKES_ITEMS
    return hasattr(load_installed(spec.name), "make_item")


def is_live(spec: EnvSpec) -> bool:
    """Do its trajectories have sessions, bound to one env worker? An installed class then has a method `open`."""
    if spec.name in (*BUILT_IN, SUPERVISED):
        return spec.name in LIVE
    return hasattr(load_installed(spec.name), "open")


def installed(*, again: bool = False) -> dict[str, EntryPoint]:
    """The installed environments, by name; built-in names are taken. Searches again whenever a folder of packages has
    changed; `again`: in any case, for a folder changes before its package's entry points exist."""
    if again:
        _installed.cache_clear()
    return _installed(tuple((folder, os.stat(folder).st_mtime_ns) for folder in sys.path if os.path.isdir(folder)))


@lru_cache(maxsize=1)
def _installed(_: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in (*BUILT_IN, SUPERVISED)}


async def imported(spec: EnvSpec, beat: Callable[[], None]) -> None:
    """Imports an installed environment in a thread if it is new here: that takes some half a minute, in which the event loop must go on,
    and nobody take the work over. What fails is told by `load_installed`. Raises InvalidInput after IMPORT_S."""
    if spec.name in (*BUILT_IN, SUPERVISED):
        return
    if (entry := installed().get(spec.name)) and sys.modules.get(entry.module) in _in_use:
        return
    try:
        async with asyncio.timeout(IMPORT_S):
            with suppress(InvalidInput):
                await beating(beat, asyncio.to_thread(load_installed, spec.name))
    except TimeoutError as error:
        raise InvalidInput(f"importing the environment {quoted(spec.name)} takes more than {IMPORT_S:g} s") from error


def load_installed(name: str) -> Any:
    """The class behind an entry point. Raises InvalidInput if it does not exist or cannot be imported."""
    found = installed()
    if name not in found:
        found = installed(again=True)
    if name not in found:
        known = [*BUILT_IN, *found]
        raise InvalidInput(
            f"unknown environment {quoted(name)}{did_you_mean(name, known)}; known: {', '.join(known)}",
            param="environment.name",
        )
    entry = found[name]
    try:
        return _loaded(entry)
    except (Exception, SystemExit) as error:  # foreign code; a script may end when it is imported
        hint = f"; {why}" if (why := outdated(entry)) else ""
        reason = f"{type(error).__name__}: {error}{hint}"
        raise InvalidInput(
            f"the installed environment {quoted(name)} cannot be loaded: {reason}", param="environment.name"
        ) from error
    finally:
        if module := sys.modules.get(entry.module):
            _in_use.setdefault(module, (_version(entry), _written(module)))


_in_use: WeakKeyDictionary[ModuleType, tuple[str, int]] = WeakKeyDictionary()
"""Module -> its package's version and its file's time at its first import, which Python keeps."""


def outdated(entry: EntryPoint) -> str | None:
    """A warning if its package's version, or its module's file, has changed since this process loaded it."""
    module, now = sys.modules.get(entry.module), _version(entry)
    if module is None or module not in _in_use:
        return None
    used, written = _in_use[module]
    if used != now:
        return f"{now} is installed, and {used} {_UNTIL}"
    return (
        None
        if written == _written(module)
        else f"the file of {entry.module} has changed, and the older one is {_UNTIL}"
    )


_UNTIL = "in use until managers and env workers start again"


def _written(module: ModuleType) -> int:
    """Time at which the module's file was written, by the file system's clock; 0 if there is none."""
    try:
        return os.stat(module.__file__ or "").st_mtime_ns
    except OSError:
        return 0


def _version(entry: EntryPoint) -> str:
    return entry.dist.version if entry.dist else "unknown"


def _loaded(entry: EntryPoint) -> Any:
    """The object that it names, also if it was installed a moment ago."""
    try:
        return entry.load()
    except ModuleNotFoundError:
        importlib.invalidate_caches()
        if entry.dist is not None:
            site.addsitedir(str(entry.dist.locate_file("")))  # the `.pth` of an editable one says where its modules are
        return entry.load()


def _validate_installed(spec: EnvSpec, param: str) -> None:
    made: Any = load_installed(spec.name)
    _check_size(spec, param)
    model: Any = getattr(made, "Args", None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        parse(model, spec.args, param=f"{param}.args")
    else:
        _check_keywords(made, spec.args, param=f"{param}.args")


def _check_size(spec: EnvSpec, param: str) -> None:
    """Raises InvalidInput: arguments travel in every message."""
    if (size := len(msgspec.json.encode(spec.args))) > MAX_ARGS_BYTES:
        raise InvalidInput(f"{param}.args have {size} bytes, more than {MAX_ARGS_BYTES}", param=f"{param}.args")


def _check_keywords(made: Any, args: Mapping[str, Any], *, param: str) -> None:
    """Raises InvalidInput unless a class can be called with these keyword arguments."""
    parameters = inspect.signature(made).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    names = [name for name, one in parameters.items() if one.kind not in _WITHOUT_NAME]
    for name in args:
        if name not in names:
            raise InvalidInput(
                f"unknown field {quoted(name)} in {param}{did_you_mean(name, names)}", param=f"{param}.{cut(name)}"
            )
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in args:
            raise InvalidInput(f"{param}.{name} is missing", param=f"{param}.{name}")


_WITHOUT_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
