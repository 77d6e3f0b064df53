"""Rows of a job's file. An example of a supervised job becomes tokens, and which of them are learned:

    {"messages": [..., {"role": "assistant", "content": "3"}]}     OpenAI's form: all turns of the assistant are learned, but those
                                                                   of `weight` 0; `tools` are rendered
    {"prompt": [messages], "completion": [messages]}               TRL's: only those of the completion
    {"prompt": "add 1+2", "completion": "3"}                       TRL's plain text: no chat template; a token ends the completion

A learned turn has exactly the tokens of its rollout, its end-of-turn token included: it begins where the template lets the
model begin. An item of a job with rewards says what is asked; graders may use any other field:

    {"messages": [...], "answer": "3"}                             OpenAI's form
    {"prompt": [messages], "answer": "3"}                          TRL's
    {"prompt": "add 1+2", "answer": "3"}                           TRL's plain text: one message of the user
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from common.text.chat_messages import check_messages, normal_tool, valid_text
from common.text.tokens import ChatTokenizer

MAX_TURNS = 32
"""Turns of the assistant that are learned from one example: each renders the conversation again."""

Messages = Sequence[Mapping[str, Any]]


class Example(NamedTuple):
    tokens: list[int]
    written: list[int]  # 1: the token is learned


def is_example(item: Mapping[str, Any]) -> bool:
    """Does a row ask for an answer? If so, it is an item whose answers are sampled and rewarded."""
    if _has_completion(item):
        return True
    messages: Any = item.get("messages")
    last: Any = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and cast(Mapping[str, Any], last).get("role") == "assistant"


def is_text(item: Mapping[str, Any]) -> bool:
    """Is it an example of plain text, which is learned without the chat template?"""
    return _has_completion(item) and isinstance(item["completion"], str)


def _has_completion(item: Mapping[str, Any]) -> bool:
    """Does the item teach a completion? Next to `messages` that field is for graders."""
    return item.get("completion") is not None and "messages" not in item


def check_example(item: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the field, for what no base model can learn."""
    if is_text(item):
        return _check_text(item)
    talk, _ = _conversation(item)
    check_messages(talk)
    _tools(item)


def read_example(item: Mapping[str, Any], tokenizer: ChatTokenizer) -> Example:
    """Raises ValueError, naming the field, for what is no example or cannot be rendered by this base."""
    if is_text(item):
        return _of_text(item, tokenizer)
    talk, learned = _conversation(item)
    return _of_talk(talk, learned, _tools(item), tokenizer)


def _tools(item: Mapping[str, Any]) -> Messages:
    tools: Any = [] if item.get("tools") is None else item["tools"]
    if not isinstance(tools, list):
        raise ValueError("tools must be a list")
    for place, tool in enumerate(cast(list[Any], tools)):
        normal_tool(tool, f"tools[{place}]")
    return cast(Messages, tools)


def _check_text(item: Mapping[str, Any]) -> None:
    if not isinstance(item.get("prompt"), str) or not item["completion"]:
        raise ValueError("prompt and completion must both be text, the completion not empty, or both lists of messages")
    valid_text(item["prompt"], "prompt")
    valid_text(item["completion"], "completion")


def _of_text(item: Mapping[str, Any], tokenizer: ChatTokenizer) -> Example:
    _check_text(item)
    prompt = tokenizer.encode(item["prompt"])
    completion = [*tokenizer.encode(item["completion"]), tokenizer.end_of_turn_ids[0]]
    if not prompt:
        raise ValueError("the prompt is empty")
    return Example([*prompt, *completion], [0] * len(prompt) + [1] * len(completion))


def _conversation(item: Mapping[str, Any]) -> tuple[Messages, list[int]]:
    """All messages, and the places of those that are learned."""
    if _has_completion(item):
        prompt, completion = _messages(item, "prompt"), _messages(item, "completion")
        talk, first = [*prompt, *completion], len(prompt)
    else:
        talk, first = _messages(item, "messages"), 0
    if talk[-1].get("role") != "assistant":
        raise ValueError("the last message must be the assistant's: it is what is learned")
    learned = [n for n in range(first, len(talk)) if talk[n].get("role") == "assistant" and _weight(talk[n], n)]
    if not learned:
        raise ValueError("no message of the assistant is to be learned")
    if learned[0] == 0:
        raise ValueError("before the assistant's first message there must be another")
    if len(learned) > MAX_TURNS:
        raise ValueError(f"{len(learned)} messages of the assistant; at most {MAX_TURNS} are learned from one example")
    return talk, learned


def _messages(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found: Any = item.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{name} must be a list of at least one message")
    messages = cast(list[Any], found)
    if any(not isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{name} must be a list of messages")
    return messages


def _weight(message: Mapping[str, Any], place: int) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"messages[{place}].weight must be 0 or 1")
    return bool(weight)


def _of_talk(talk: Messages, learned: list[int], tools: Messages, tokenizer: ChatTokenizer) -> Example:
    tokens = _closed(talk, tools, tokenizer)
    written = [0] * len(tokens)
    if len(tokens) >= tokenizer.context:  # refused by whoever knows where it stands, whatever of it is learned
        return Example(tokens, written)
    for place in learned:
        before = tokenizer.render(talk[:place], tools)
        after = tokens if place == len(talk) - 1 else _closed(talk[: place + 1], tools, tokenizer)
        if tokens[: len(before)] != before or tokens[: len(after)] != after:
            raise ValueError(
                f"messages[{place}]: the chat template shows this turn otherwise once others follow, so it cannot be learned:"
                ' give it "weight": 0, or make it the last of an example of its own'
            )
        written[len(before) : len(after)] = [1] * (len(after) - len(before))
    return Example(tokens, written)


def _closed(talk: Messages, tools: Messages, tokenizer: ChatTokenizer) -> list[int]:
    """A conversation up to the token that ends its last turn."""
    ids = tokenizer.render(talk, tools, add_generation_prompt=False)
    ends = [n for n, token in enumerate(ids) if token in tokenizer.end_of_turn_ids]
    if not ends:
        raise ValueError("the chat template does not end the assistant's turn: nothing could be learned to end")
    return ids[: ends[-1] + 1]


def with_messages(item: dict[str, Any]) -> dict[str, Any]:
    """The item with `messages`, made of a `prompt` if need be; an example, and what is neither, as it is."""
    if "messages" in item or item.get("prompt") is None or is_example(item):
        return item
    return item | {"messages": _prompt(item)}


def _prompt(item: Mapping[str, Any]) -> Any:
    """The conversation of a `prompt`, unchecked."""
    prompt = item["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
