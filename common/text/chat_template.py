"""A base model's chat template, compiled with the surroundings that transformers gives it."""

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidInput
from common.suggestions import did_you_mean, quoted

TemplateKwargs = dict[str, bool | int | float | str]
"""Values of a chat template's own variables, such as `{"enable_thinking": False}`, as vLLM and transformers call them."""
KWARGS = "chat_template_kwargs"
MAX_KWARGS = 1024
"""Characters of all of them as JSON."""
OURS = {"messages", "tools", "add_generation_prompt"}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Finds a message's members, which templates name most, without a failed lookup of an attribute."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return cast(dict[str, Any], obj)[attribute]
        return super().getattr(obj, attribute)


def compile_template(template: str) -> tuple[jinja2.Template, set[str]]:
    """A template in the environment that transformers gives it, and its own variables. Raises ValueError if it does not parse."""
    environment = TemplateEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    surroundings: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    template_globals: Any = environment.globals  # jinja's own type names only its built-in globals
    template_globals.update(surroundings)
    try:
        compiled = environment.from_string(template)
        compiled.globals = dict(compiled.globals)  # of one piece, for it is read at every rendering
        named = find_undeclared_variables(environment.parse(template))
        return compiled, {name for name in named if name not in compiled.globals} - OURS - set(TOKENS)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template does not parse: {error}") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Neither escapes HTML nor sorts keys, unlike jinja's own filter."""
    chosen: dict[str, Any] = {"ensure_ascii": False, "indent": indent} | options
    return json.dumps(value, **chosen)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def check_kwargs(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises InvalidInput, with the name, for a variable that the template does not read, and for values that are too long."""
    for name in given:
        if name not in known:
            its = f"its own are {', '.join(sorted(known))}" if known else "it has none of its own"
            raise InvalidInput(
                f"{KWARGS}: this base model's chat template reads no {quoted(name)}; {its}{did_you_mean(name, known)}",
                param=KWARGS,
            )
    if len(json.dumps(given)) > MAX_KWARGS:
        raise InvalidInput(f"{KWARGS}: at most {MAX_KWARGS} characters", param=KWARGS)


TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def token_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`eos_token` and the like, which templates may name."""
    tokens = {name: tokenizer_config.get(name) for name in TOKENS}
    texts = {name: token["content"] if isinstance(token, Mapping) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
