"""Items of a job with rewards: a row of its file says what is asked, and any other field is one that graders may use.

{"messages": [...], "answer": "3"}        OpenAI's form
{"prompt": [messages], "answer": "3"}     TRL's
{"prompt": "add 1+2", "answer": "3"}      TRL's plain text: one message of the user
"""

from collections.abc import Mapping
from typing import Any

from common.text.examples import is_example


def with_messages(item: dict[str, Any]) -> dict[str, Any]:
    """The item with `messages`, which a `prompt` stands for where there are none; an example, and what is neither, as it is."""
    if "messages" in item or item.get("prompt") is None or is_example(item):
        return item
    return item | {"messages": asked(item)}


def asked(item: Mapping[str, Any]) -> Any:
    """The conversation of a `prompt`, unchecked."""
    prompt = item["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
