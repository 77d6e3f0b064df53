"""Reads what the model wrote as a Turn, and renders what it is shown as tokens.

Long texts are worked on in threads, whose time the work is charged for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from common.errors import InvalidInput
from common.text.chat_template import KWARGS
from common.text.tokens import ChatTokenizer
from common.wire.messages import EnvSpec, TurnResult
from env_service import work
from env_service.environment import Step, Turn
from env_service.failures import EnvironmentFailed
from env_service.trajectory import Context

LONG_TEXT, LONG_TURN = 16 << 10, 4 << 10
"""Characters of messages, and tokens of a turn. More keep a thread busy for longer than 10 ms."""

Tools = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Conversation:
    """The conversations of one base model's chat template."""

    def __init__(self, tokenizer: ChatTokenizer, threads: work.Threads, *, is_told: bool = False) -> None:
        """`is_told`: a job says values of the template's variables, which an environment that renders itself would not see."""
        self._tokenizer = tokenizer
        self._threads = threads
        self._is_told = is_told
        self._read: tuple[TurnResult | None, str] = None, ""
        """The last turn that was read, with its text: the environment sees it, then the job's owner."""

    def told(self, env: EnvSpec) -> "Conversation":
        """The conversations of a job, whose template is told what its environment says. Raises InvalidInput."""
        kwargs = env.chat_template_kwargs
        return Conversation(self._tokenizer.told(kwargs), self._threads, is_told=True) if kwargs else self

    async def opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, tokens: Sequence[int] = ()
    ) -> list[int]:
        """The prompt. `tokens`: rendered by the environment. Raises InvalidInput, EnvironmentFailed."""
        return await self._beside(_is_long([messages, tools, tokens]), lambda: self._opening(messages, tools, tokens))

    async def turn(self, result: TurnResult, context: Context, tools: Tools) -> Turn:
        return await self._beside(len(result.tokens) > LONG_TURN, lambda: self._turn(result, context, tools))

    async def reply(self, result: TurnResult, step: Step) -> list[int]:
        """The environment's tokens; they close a turn that a stop string ended. Raises EnvironmentFailed."""
        return await self._beside(_is_long([step.messages, step.tokens]), lambda: self._reply(result, step))

    async def read(self, result: TurnResult) -> str:
        """Returns what `text` does."""
        return await self._beside(len(result.tokens) > LONG_TURN, lambda: self.text(result))

    async def decoded(self, tokens: Sequence[int]) -> str:
        return await self._beside(len(tokens) > LONG_TURN, lambda: self._tokenizer.decode(tokens))

    async def _beside(self, is_long: bool, function: Callable[[], T]) -> T:
        """Calls the function, in a thread if it takes long."""
        return await self._threads.run(function) if is_long else function()

    def text(self, result: TurnResult) -> str:
        """The text of the model's turn, up to the stop string."""
        turn, text = self._read
        if turn is not result:
            text = _cut(self._tokenizer.decode(result.tokens.numpy().tolist()), result.stop_string)
            self._read = result, text
        return text

    def _opening(self, messages: Sequence[Mapping[str, Any]], tools: Tools, tokens: Sequence[int]) -> list[int]:
        if tokens and self._is_told:
            raise InvalidInput(f"{KWARGS}: this environment renders its prompts itself, and is not told: leave it out")
        if tokens:
            return self._checked(tokens)
        try:
            return self._tokenizer.render(messages, tools)
        except ValueError as error:
            raise InvalidInput(str(error)) from error

    def _turn(self, result: TurnResult, context: Context, tools: Tools) -> Turn:
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

    def _reply(self, result: TurnResult, step: Step) -> list[int]:
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


def _is_long(value: Any) -> bool:
    """Has it more than LONG_TEXT characters in all its texts, or as many other values?"""
    left, waiting = LONG_TEXT, [value]
    while waiting and left >= 0:
        item = waiting.pop()
        left -= len(item) if isinstance(item, str) else 1
        if isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
    return left < 0
