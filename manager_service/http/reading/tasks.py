"""Declares the tasks of helper processes, and does them. Tasks and answers are data, so that they travel as msgpack."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidInput
from common.tasks.environments import grader_of, validate_environment
from common.tasks.graders import Grader, check_item, check_sources, item_fields, validate_grader
from common.text.chat_template import TemplateKwargs
from common.text.grammars import call_grammar, json_grammar
from common.text.tokens import ChatTokenizer
from common.text.tool_calls import OPEN
from common.wire.messages import EnvSpec
from manager_service.http.reading.adapter_uploads import read_adapter
from manager_service.http.reading.item_lines import LongPrompts, check_items, check_lines
from manager_service.http.reading.json_values import parse_json
from manager_service.http.tinker.wire.learning import read_pass
from manager_service.http.tinker.wire.sample_requests import read_sample

Ids = TypeVar("Ids", bound=Sequence[int])


class ParseBody(msgspec.Struct, tag=True, frozen=True):
    """Gives the value of a JSON text."""

    text: bytes


class Render(msgspec.Struct, tag=True, frozen=True):
    """Gives the token ids of a conversation."""

    base: str
    messages: list[Any]
    tools: list[Any]
    told: TemplateKwargs = {}


class Encode(msgspec.Struct, tag=True, frozen=True):
    """Gives the token ids of each text."""

    base: str
    texts: list[str]


class Constrain(msgspec.Struct, tag=True, frozen=True):
    """Gives the grammar of an answer: JSON of the schema, one call of these functions, or either."""

    base: str
    schema: dict[str, Any] | None
    functions: list[Any]


class Spell(msgspec.Struct, tag=True, frozen=True):
    """Gives the text that each token adds, special tokens included; empty where it ends no character."""

    base: str
    ids: list[int]


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Gives the text of each piece, special tokens included."""

    base: str
    pieces: list[list[int]]


class CheckLines(msgspec.Struct, tag=True, frozen=True):
    """Gives FoundItems, of lines of a new file."""

    lines: bytes
    before: int  # number of lines above these
    max_line_bytes: int


class ReadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Gives Found, of the header of a safetensors file."""

    header: bytes
    size: int  # of the file
    config: str


class CheckItems(msgspec.Struct, tag=True, frozen=True):
    """Gives LongPrompts, of lines of a file that a job is to use."""

    lines: bytes
    before: int
    base: str
    examples: bool  # whether all are examples to learn, or all items to answer
    fields: list[str]  # that all must have
    most: int | None  # tokens of a prompt, or an example; None: they are not measured
    param: str
    told: TemplateKwargs = {}


class ReadPass(msgspec.Struct, tag=True, frozen=True):
    """Gives CheckedPass, of a pass over data in the Tinker protocol."""

    body: bytes
    content_type: str
    encoding: str
    max_bytes: int  # unpacked


class ReadSample(msgspec.Struct, tag=True, frozen=True):
    """Gives CheckedSample, of a request for samples in the Tinker protocol."""

    body: bytes


class CheckGrader(msgspec.Struct, tag=True, frozen=True):
    """Gives nothing. `item`: must have the fields that the grader needs, if there is one."""

    grader: dict[str, Any]
    item: dict[str, Any] | None
    param: str


class CheckMethod(msgspec.Struct, tag=True, frozen=True):
    """Gives the fields of an item that the grader of a job needs, sorted. `grader`: None if the environment says it."""

    environment: str
    args: dict[str, Any]
    grader: dict[str, Any] | None
    param: str


Task = (
    ParseBody
    | Render
    | Encode
    | Constrain
    | Spell
    | Decode
    | CheckLines
    | ReadAdapter
    | CheckItems
    | CheckGrader
    | CheckMethod
    | ReadPass
    | ReadSample
)


def do(task: Task, tokenizers: Mapping[str, ChatTokenizer]) -> Any:
    """The answer to a task. Raises InvalidInput."""
    match task:
        case ParseBody():
            return _body(task.text)
        case Render():
            return _render(task, tokenizers[task.base].told(task.told))
        case Encode():
            return [_encode(text, tokenizers[task.base]) for text in task.texts]
        case Constrain():
            return _grammar(task, tokenizers[task.base])
        case Spell():
            return _spelt(task.ids, tokenizers[task.base])
        case Decode():
            return [tokenizers[task.base].decode(ids, skip_special=False) for ids in task.pieces]
        case CheckLines():
            limit = task.max_line_bytes
            return check_lines(task.lines, before=task.before, max_line_bytes=limit, tokenizers=tokenizers)
        case ReadAdapter():
            return read_adapter(task.header, task.size, task.config)
        case CheckItems():
            return _check_items(task, tokenizers[task.base].told(task.told))
        case ReadPass():
            return read_pass(
                task.body, content_type=task.content_type, encoding=task.encoding, max_bytes=task.max_bytes
            )
        case ReadSample():
            return read_sample(task.body)
        case CheckGrader():
            return _check_grader(task)
        case CheckMethod():
            return _fields_of_method(task)


def _check_items(task: CheckItems, tokenizer: ChatTokenizer) -> LongPrompts:
    return check_items(
        task.lines,
        before=task.before,
        tokenizer=tokenizer,
        examples=task.examples,
        fields=task.fields,
        most=task.most,
        param=task.param,
    )


def _check_grader(task: CheckGrader) -> None:
    grader = _grader(task.grader, task.param)
    if task.item is not None:
        check_item(grader, task.item, param=task.param)


def _fields_of_method(task: CheckMethod) -> list[str]:
    if task.grader is not None:
        return sorted(item_fields(_grader(task.grader, f"{task.param}.grader")))
    spec, param = EnvSpec(task.environment, task.args), f"{task.param}.environment"
    validate_environment(spec, param=param)
    grader = grader_of(spec, param=param)
    if grader:
        check_sources(grader, param=f"{param}.args.grader")
    return sorted(item_fields(grader)) if grader else []


def _grader(given: dict[str, Any], param: str) -> Grader:
    grader = validate_grader(given, param=param)
    check_sources(grader, param=param)
    return grader


def _body(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error


def _render(task: Render, tokenizer: ChatTokenizer) -> list[int]:
    try:
        _check_length(tokenizer.least_tokens(_characters(task.messages)), tokenizer, "messages", at_least=True)
        return with_room(tokenizer.render(task.messages, task.tools), tokenizer, "messages")
    except ValueError as error:
        raise InvalidInput(str(error), param="messages") from error


def _encode(text: str, tokenizer: ChatTokenizer) -> list[int]:
    try:
        _check_length(tokenizer.least_tokens(len(text)), tokenizer, "prompt", at_least=True)
        return with_room(tokenizer.encode(text), tokenizer)
    except ValueError as error:
        raise InvalidInput(str(error), param="prompt") from error


def _grammar(task: Constrain, tokenizer: ChatTokenizer) -> str:
    param = "response_format"
    try:
        answer = "" if task.schema is None else json_grammar(task.schema)
        if not task.functions:
            return answer
        param = "tools"
        return call_grammar(task.functions, tags_are_tokens=tokenizer.adds(OPEN), instead=answer)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{param}: {error}", param=param) from error


def _characters(messages: list[Any]) -> int:
    """Characters of the texts of messages that are plain strings."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _spelt(ids: list[int], tokenizer: ChatTokenizer) -> list[str]:
    decoder = tokenizer.stream_decoder(skip_special=False)
    pieces = [decoder.feed([token]) for token in ids]
    if pieces:
        pieces[-1] += decoder.finish()
    return pieces


def with_room(ids: Ids, tokenizer: ChatTokenizer, param: str = "prompt") -> Ids:
    """The ids of a prompt. Raises InvalidInput if there are none, or no room for an answer. `param`: what a user may shorten."""
    if not ids:
        raise InvalidInput("the prompt is empty", param="prompt")
    _check_length(len(ids), tokenizer, param)
    return ids


def _check_length(num_tokens: int, tokenizer: ChatTokenizer, param: str, *, at_least: bool = False) -> None:
    """`at_least`: a prompt may have more tokens than these."""
    if num_tokens >= tokenizer.context:
        size = f"{num_tokens} tokens or more" if at_least else f"{num_tokens} tokens"
        raise InvalidInput(
            f"This model's maximum context length is {tokenizer.context} tokens, and the prompt has {size}: there is no room for an"
            f" answer; shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )
