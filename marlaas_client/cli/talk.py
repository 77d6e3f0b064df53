"""A conversation with a model, through the `openai` client."""

from collections.abc import Iterator
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

from marlaas_client.cli.output import say
from marlaas_client.client import Client, error_message
from marlaas_client.errors import Refused, Unavailable


class Talk:
    """Raises Refused or Unavailable, as the other commands do."""

    def __init__(self, client: Client, options: dict[str, Any]) -> None:
        self._api = client.openai
        self._options = options
        self._messages: list[ChatCompletionMessageParam] = []

    def answer(self, text: str) -> dict[str, Any]:
        """The whole completion, as the API gives it."""
        self._messages.append({"role": "user", "content": text})
        with Translated():
            reply = self._api.chat.completions.create(messages=self._messages, stream=False, **self._options)
        return reply.model_dump()

    def show(self, text: str) -> None:
        """Prints the answer as it comes."""
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        for part in self._stream():
            say(part, keep="\n\t", end="")
            parts.append(part)
        say("")
        self._messages.append({"role": "assistant", "content": "".join(parts)})

    def converse(self) -> None:
        """Talks until an empty line or the end of the input."""
        while text := _ask():
            self.show(text)

    def _stream(self) -> Iterator[str]:
        with Translated():
            for chunk in self._api.chat.completions.create(messages=self._messages, stream=True, **self._options):
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content


class Translated:
    """Turns errors of the `openai` client into ours."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, openai.APIStatusError):
            text = error_message(error.status_code, error.response.text)
            raise Refused(text, error.status_code) from error
        if isinstance(error, openai.APIError):
            raise Unavailable(str(error)) from error


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
