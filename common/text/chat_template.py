"""A base model's chat template, compiled with the surroundings that transformers gives it."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Finds a message's members, which templates name most, without a failed lookup of an attribute."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return cast(dict[str, Any], obj)[attribute]
        return super().getattr(obj, attribute)


def compile_template(template: str) -> jinja2.Template:
    """A template in the environment that transformers gives it. Raises ValueError if it does not parse."""
    environment = TemplateEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    surroundings: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    template_globals: Any = environment.globals  # jinja's own type names only its built-in globals
    template_globals.update(surroundings)
    try:
        compiled = environment.from_string(template)
        compiled.globals = dict(compiled.globals)  # of one piece, for it is read at every rendering
        return compiled
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


def token_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`eos_token` and the like, which templates may name."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    tokens = {name: tokenizer_config.get(name) for name in names}
    texts = {name: token["content"] if isinstance(token, Mapping) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
