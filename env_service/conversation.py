"""The conversation between a model and an environment: what the model wrote as a Turn, and what it is shown as tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidInput
from common.messages import TurnResult
from common.text.tokens import ChatTokenizer
from env_service.environment import Step, Turn
from env_service.failures import EnvironmentFailed
from env_service.trajectory import Context

Tools = Sequence[Mapping[str, Any]]


class Conversation:
    """Of one base model."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Tools, tokens: Sequence[int] = ()) -> list[int]:
        """The prompt; `tokens` is one that the environment has rendered. Raises InvalidInput, EnvironmentFailed."""
        if tokens:
            return self._checked(tokens)
        try:
            return self._tokenizer.render(messages, tools)
        except ValueError as error:
            raise InvalidInput(str(error)) from error

    def turn(self, result: TurnResult, context: Context, tools: Tools) -> Turn:
        ids = result.tokens.numpy().tolist()
        marked = _cut(self._tokenizer.decode(ids, skip_special=False), result.stop_string)
        content, calls = self._tokenizer.parse_tool_calls(marked, tools)
        cut_off = result.stop_reason != "stop"
        return Turn(
            item=context.item,
            text=self.text(result),
            calls=tuple(calls),
            content=content,
            tokens=ids,
            logprobs=result.logprobs.numpy().tolist(),
            index=result.request.turn,
            stop_reason=result.stop_reason,
            last=cut_off or result.request.turn + 1 >= context.max_turns,
            tool_timeout_s=context.tool_timeout_s,
            key=result.request.id,
        )

    def text(self, result: TurnResult) -> str:
        return _cut(self._tokenizer.decode(result.tokens.numpy().tolist()), result.stop_string)

    def reply(self, result: TurnResult, step: Step) -> list[int]:
        """The environment's tokens; they close the model's turn if a stop string, and no token, has ended it. Raises
        EnvironmentFailed."""
        if step.tokens:
            return self._checked(step.tokens)
        try:
            reply = self._tokenizer.reply(step.messages)
        except ValueError as error:
            raise EnvironmentFailed(f"the environment's messages cannot be shown to the model: {error}") from error
        ends = self._tokenizer.end_of_turn_ids
        closed = len(result.tokens) > 0 and int(result.tokens.numpy()[-1]) in ends
        return reply if closed else [ends[0], *reply]

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        if any(not 0 <= token < self._tokenizer.vocab_size for token in tokens):
            raise EnvironmentFailed("the environment's prompt has tokens that the base model does not")
        return [*tokens]


def _cut(text: str, stop_string: str) -> str:
    """Text up to the stop string that ended the turn."""
    return text.rpartition(stop_string)[0] if stop_string and stop_string in text else text
