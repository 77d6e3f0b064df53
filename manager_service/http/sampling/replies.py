"""Turns the tokens of a completion into text: whole characters, cut before stop strings, with tool calls parsed."""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from common.text.tokens import ChatTokenizer, ToolCall
from common.wire.messages import TurnResult

TOOL_TAG = "<tool_call>"


class AnswerText:
    """The text of one choice as its tokens come. Holds back characters that could begin a stop string."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str], tools: Sequence[Any] | None) -> None:
        """`tools` None: tool calls are text like any other."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._stop = tuple(stop)
        self._until = self._stop if tools is None else (*self._stop, TOOL_TAG)
        self._decoder = tokenizer.stream_decoder()
        self._held = ""
        self._ended = False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.result: TurnResult | None = None

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
        """The text that these tokens complete."""
        self.tokens += tokens
        self.logprobs += logprobs
        return self._advance(self._decoder.feed(tokens))

    def finish(self) -> str:
        """The characters that were held back."""
        text = self._advance(self._decoder.finish())
        rest, self._held = ("" if self._ended else self._held), ""
        return text + rest

    def _advance(self, piece: str) -> str:
        if self._ended:
            return ""
        text = self._held + piece
        at = first_of(text, self._until)
        if at is not None:
            self._ended, self._held = True, ""
            return text[:at]
        keep = longest_beginning(text, self._until)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def visible_tokens(self) -> int:
        """The number of tokens that are text: all but the end-of-turn token."""
        ended = bool(self.tokens) and self.tokens[-1] in self._tokenizer.end_of_turn_ids
        return len(self.tokens) - ended

    def text(self) -> str:
        """The whole text, cut before the first stop string."""
        whole = self._tokenizer.decode(self.tokens)
        at = first_of(whole, self._stop)
        return whole if at is None else whole[:at]

    def message(self) -> tuple[str, list[ToolCall]]:
        """The whole answer: its content, and its tool calls if tools were given."""
        if self._tools is None:
            return self.text(), []
        raw = self._tokenizer.decode(self.tokens, skip_special=False)
        at = first_of(raw, self._stop)
        return self._tokenizer.parse_tool_calls(raw if at is None else raw[:at], self._tools)


def first_of(text: str, strings: Sequence[str]) -> int | None:
    """The place at which the first of the strings begins."""
    return min((at for s in strings if (at := text.find(s)) >= 0), default=None)


def longest_beginning(text: str, strings: Sequence[str]) -> int:
    """The number of last characters that could be the beginning of one of the strings."""
    return max((n for s in strings for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)


def finish_reason(answer: AnswerText, calls: Sequence[ToolCall]) -> str:
    assert answer.result is not None
    if any(call.error is None for call in calls):
        return "tool_calls"
    return "length" if answer.result.stop_reason in ("length", "context") else "stop"


def shown_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Well-formed calls in OpenAI's form. Malformed ones stay text: see `with_malformed`."""
    return [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
        }
        for call in calls
        if call.error is None
    ]


def with_malformed(content: str, calls: Sequence[ToolCall]) -> str:
    """The content, followed by the calls that cannot be parsed, as the model wrote them."""
    return content + "".join(f"{TOOL_TAG}{call.text}" for call in calls if call.error is not None)


def token_logprobs(answer: AnswerText, tokenizer: ChatTokenizer, num_top: int) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content` of a finished choice."""
    assert answer.result is not None
    tokens = answer.tokens[: answer.visible_tokens()]
    return _rows(tokenizer, tokens, answer.logprobs, answer.result.top_logprobs, num_top)


def echoed_logprobs(answer: AnswerText, tokenizer: ChatTokenizer, num_top: int) -> list[dict[str, Any]]:
    """The same of the prompt's tokens and all that were sampled. The very first token has a log-prob of None."""
    result = answer.result
    assert result is not None
    request = result.request
    prompt = request.tokens.numpy()[: request.num_prompt].tolist()
    logprobs = [None, *result.prompt_logprobs.numpy()[1:].tolist()]
    before = _rows(tokenizer, prompt, logprobs, result.prompt_top_logprobs, num_top)
    return before + _rows(tokenizer, answer.tokens, answer.logprobs, result.top_logprobs, num_top)


def _rows(
    tokenizer: ChatTokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Sequence[tuple[int, float]]],
    num_top: int,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, token in enumerate(tokens):
        top = tops[i][:num_top] if i < len(tops) else []
        shown = [token_logprob(tokenizer, other, value) for other, value in top]
        rows.append(token_logprob(tokenizer, token, logprobs[i]) | {"top_logprobs": shown})
    return rows


def token_logprob(tokenizer: ChatTokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    text, encoded = _text_of(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": encoded}


@lru_cache(maxsize=1 << 16)
def _text_of(tokenizer: ChatTokenizer, token: int) -> tuple[str, tuple[int, ...]]:
    text = tokenizer.decode([token], skip_special=False)
    return text, tuple(text.encode())
