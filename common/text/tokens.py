"""Chat messages to token ids and back: the only renderer of the project. No torch, no transformers.

    ChatTokenizer.load(folder)
      render(messages, tools)      -> ids of a whole conversation
      told(kwargs)                 -> the same, whose template has these variables too: `enable_thinking`
      reply(messages)              -> ids to append after a model turn that ended with its end-of-turn token
      parse_tool_calls(text)       -> what a model turn says, and what it calls
      stream_decoder()             -> text from ids as they come, whole characters only

Special tokens come only from the chat template. `render` chooses a mark, a character that no string of the caller has, and
sets it into every part of those strings that could become part of a special token. It splits the rendered template at the
special tokens without a mark, removes the marks from the pieces between, and encodes these by a tokenizer without special
tokens. So `<|end|>` in a user's text stays seven bytes, and for a conversation without such text the ids are exactly those
of Hugging Face's `apply_chat_template` (checked when a folder is loaded).

Limits: a template that looks for special tokens in contents does not find them (Qwen3's removes `<think>` parts of earlier
assistant turns: they stay, as text); text parts only; a template that measures or cuts contents sees marks.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from common.errors import InvalidInput
from common.suggestions import quoted
from common.text.chat_messages import (
    DUMMY_TOOL,
    ChatMessage,
    check_messages,
    dummy_turn,
    normal_message,
    normal_tool,
    valid_text,
)
from common.text.chat_template import check_kwargs, compile_template, token_variables
from common.text.model_folder import (
    OwnSettings,
    positive,
    read_config,
    read_json,
    read_template,
    read_text,
    usual_learning_rate,
)
from common.text.special_tokens import Specials, parse_tokenizer, unused_mark, without_added_tokens
from common.text.tool_calls import CLOSE, OPEN, ToolCall, ToolFormat, malformed, parse_compact, parse_hermes

__all__ = ["ChatTokenizer", "StreamDecoder", "ToolCall", "check_messages"]

MAX_CACHED_REPLIES, MAX_CACHED_CHARACTERS = 1024, 4000
"""Replies whose ids are cached, since tools often say the same to a group's samples; longer ones are not."""
REPLY_ROLES = ("tool", "user", "system")
"""Roles of messages with which an environment answers; `developer` counts as `system`."""
MAX_TOLD = 16
"""Values of a template's variables, of which a tokenizer keeps what it was told."""
MAX_SHRINKING = 4
"""Characters of a text that a tokenizer may join to one: normal forms of Unicode join two or three."""
TOOL_TALK = [*dummy_turn(1), {"role": "tool", "content": "x", "tool_call_id": "call_0"}]
HARMLESS: list[tuple[list[ChatMessage], list[ChatMessage]]] = [
    (
        [
            {"role": "user", "content": "What is 347*86? Ünï 中 🙂"},
            {"role": "assistant", "content": "29842"},
            {"role": "user", "content": "Thank you.\n\n  Bye"},
        ],
        [],
    ),
    (TOOL_TALK[:1], [DUMMY_TOOL]),
    (TOOL_TALK, [DUMMY_TOOL]),
]
"""Conversations, each with its tools, without special texts: they check a folder."""
MAX_HELD_BACK = 8
"""Ids without a whole character that a stream holds back. More are no character: it has at most four bytes."""


class ChatTokenizer:
    """The tokenizer and the chat template of one base model. Immutable, so threads may share it."""

    @classmethod
    def load(cls, path: str | Path, max_context: int | None = None) -> "ChatTokenizer":
        """Reads a base model's folder. `max_context`: serve no longer context than this.

        It holds `tokenizer.json`, `tokenizer_config.json`, `config.json`, the template
        (`chat_template.jinja`, or `chat_template` in the tokenizer's configuration) and, optionally,
        `generation_config.json` and `marlaas.json` (`OwnSettings`).

        Raises InvalidInput, naming the file, for whatever is missing or unusable.
        """
        try:
            return cls._load(Path(path), max_context)
        except ValueError as error:
            raise InvalidInput(str(error)) from error

    @classmethod
    def _load(cls, folder: Path, max_context: int | None) -> "ChatTokenizer":
        if not folder.is_dir():
            raise ValueError(f"no base model at {folder}: not a folder")
        tokenizer = cls(
            tokenizer_json=read_text(folder / "tokenizer.json"),
            tokenizer_config=read_json(folder / "tokenizer_config.json"),
            template=read_template(folder),
            config=read_config(folder),
            generation_config=read_json(folder / "generation_config.json", optional=True),
            own=OwnSettings.load(folder),
            max_context=max_context,
        )
        tokenizer._check_against_plain_rendering()
        return tokenizer

    def __init__(
        self,
        *,
        tokenizer_json: str,
        tokenizer_config: Mapping[str, Any],
        template: str,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        own: OwnSettings,
        max_context: int | None = None,
    ) -> None:
        """Takes the contents of the files that `load` names. Raises ValueError."""
        self._full = parse_tokenizer(tokenizer_json)
        self._plain = without_added_tokens(tokenizer_json)
        self._specials = Specials(self._full)
        self._longest_token = max(map(len, self._plain.get_vocab()))
        self._template, self._known = compile_template(template)
        self._kwargs: Mapping[str, Any] = {}
        self._variables = token_variables(tokenizer_config)
        text_config = config.get("text_config", config)
        whole = positive(text_config, "max_position_embeddings")
        self.context: int = min(whole, max_context or whole)
        """The most tokens that a conversation may have, the model's included."""
        self.vocab_size: int = positive(text_config, "vocab_size")
        self.end_of_turn_ids: tuple[int, ...] = self._end_ids(generation_config)
        """Tokens that end a model's turn."""
        self.learning_rate: float = float(own.learning_rate or usual_learning_rate(text_config))
        """The base's own RL rate, to be multiplied by a job's `learning_rate_multiplier`."""
        self.tool_format: ToolFormat = own.tool_format
        self._told = lru_cache(MAX_TOLD)(self._tell)
        self._with_caches()

    def _with_caches(self) -> "ChatTokenizer":
        self._reply_ids = lru_cache(MAX_CACHED_REPLIES)(self._render_reply)
        self._append_fault = lru_cache(MAX_CACHED_REPLIES)(self._find_append_fault)
        return self

    def told(self, kwargs: Mapping[str, Any]) -> "ChatTokenizer":
        """The same, whose chat template is told these values of its own variables. Raises InvalidInput, with the name, for others."""
        return self._told(json.dumps(kwargs, sort_keys=True)) if kwargs else self

    def _tell(self, kwargs_json: str) -> "ChatTokenizer":
        same = copy.copy(self)
        same._kwargs = json.loads(kwargs_json)
        check_kwargs(same._kwargs, self._known)
        return same._with_caches()

    # ------------------------------------------------------------------------------------------ text to ids

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation in OpenAI's form, ready for the model's turn.

        Contents are strings or lists of text parts; `developer` is rendered as `system`; `tools` have
        OpenAI's form (`{"type": "function", "function": {"name", "description", "parameters"}}`).

        Raises ValueError, naming the message, for anything else, and for what the template refuses.
        """
        plain = [normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        plain_tools = [normal_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        mark = unused_mark([plain, plain_tools, self._kwargs])
        # all strings but the role, by which templates decide
        marked = [self._specials.mark(message, mark) | {"role": message["role"]} for message in plain]
        kwargs = self._specials.mark(self._kwargs, mark)
        text = self._render_text(marked, self._specials.mark(plain_tools, mark), add_generation_prompt, kwargs)
        return self._encode_marked(text, mark)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; nothing in it becomes a special token, and none is added."""
        (encoding,) = self._plain.encode_batch_fast([valid_text(text, "text")], add_special_tokens=False)
        return encoding.ids  # of a batch: other threads run meanwhile, and it is several times as fast

    def least_tokens(self, num_characters: int) -> int:
        """No text of so many characters has fewer tokens, unless a tokenizer removes some, which is refused too."""
        return num_characters // (MAX_SHRINKING * self._longest_token)

    def reply(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the ids to append after a model turn that ended with its end-of-turn token.

        They are an environment's messages, of the roles in `REPLY_ROLES`, and the opening of the model's next turn. They do
        not depend on the conversation; see `reply_fault`. Raises ValueError, with advice, for other messages.
        """
        normal = [normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if fault := self.reply_fault([message["role"] for message in normal]):
            raise ValueError(fault)
        key = json.dumps(normal)
        return list(self._reply_ids(key) if len(key) <= MAX_CACHED_CHARACTERS else self._render_reply(key))

    def _render_reply(self, replies_json: str) -> tuple[int, ...]:
        replies = json.loads(replies_json)
        suffix = self._suffix(dummy_turn(_num_tools(replies)), replies)
        if suffix is None:  # `reply_fault` has seen other texts
            raise ValueError("this base model's chat template cannot append these messages to a conversation")
        return tuple(suffix)

    def reply_fault(self, roles: Sequence[str]) -> str:
        """The reason why messages of these roles, in this order, cannot be appended without changing a conversation's ids, and
        what can be; "" if they can. A base is refused for an environment whose messages it cannot append."""
        if not roles or any(role not in REPLY_ROLES for role in roles):
            return f"an environment answers with one or more messages of roles {', '.join(REPLY_ROLES)}"
        if not (why := self._append_fault(tuple(roles))):
            return ""
        can = [role for role in REPLY_ROLES if not self._append_fault((role,))]
        what = f"it can append those of roles {', '.join(can)}" if can else "it cannot have multi-turn jobs"
        shown = " and ".join(dict.fromkeys(roles))
        return (
            f"this base model's chat template cannot append messages of role {shown} to a conversation: {why}; {what}"
        )

    def _find_append_fault(self, roles: tuple[str, ...]) -> str:
        replies: list[ChatMessage] = [
            {"role": role, "content": f"reply {i}."} | ({"tool_call_id": f"call_{i}"} if role == "tool" else {})
            for i, role in enumerate(roles)
        ]
        talk = dummy_turn(_num_tools(replies))
        conversations = [talk, [*talk, *replies, *talk[1:]]]
        tools: tuple[list[ChatMessage], ...] = ([], [DUMMY_TOOL])
        try:
            suffixes = [self._suffix(talk, replies, tool) for talk in conversations for tool in tools]
        except ValueError as error:
            return str(error)
        if (first := suffixes[0]) is None or any(suffix != first for suffix in suffixes):
            return "it shows earlier turns otherwise once they follow"
        text = self.decode(first)
        return "" if all(reply["content"] in text for reply in replies) else "it leaves them out"

    def shows_tools(self) -> bool:
        """True if the chat template tells the model of the tools that it may call."""
        talk = dummy_turn(1)[:1]
        try:
            return self.render(talk, [DUMMY_TOOL]) != self.render(talk)
        except ValueError:
            return False

    # ------------------------------------------------------------------------------------------ ids to text

    def to_json(self) -> str:
        """The tokenizer as `tokenizer.json` has it."""
        return self._full.to_str()

    def adds(self, text: str) -> bool:
        """True if the text is one of the tokens that were added to the vocabulary."""
        return any(token.content == text for token in self._full.get_added_tokens_decoder().values())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD.

        The tags of tool calls are kept where the tokenizer does not call them special.
        """
        return self._full.decode(list(ids), skip_special_tokens=skip_special)

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A decoder for one stream of ids."""
        return StreamDecoder(lambda ids: self.decode(ids, skip_special=skip_special))

    def parse_tool_calls(self, text: str, tools: Sequence[ChatMessage] = ()) -> tuple[str, list[ToolCall]]:
        """Splits a model turn, decoded with `skip_special=False`, into its content and its calls.

        `tools`: those rendered; the compact format takes the argument's name from their schema ("input" without it). Never
        raises: a malformed call is a ToolCall with an error.
        """
        content, *parts = text.split(OPEN)
        calls = []
        for part in parts:
            inside, closed, after = part.partition(CLOSE)
            if not closed:
                calls.append(malformed("", self._specials.remove(inside), f"the call is not closed with {CLOSE}"))
            else:
                compact = self.tool_format == "compact"
                calls.append(parse_compact(inside, tools) if compact else parse_hermes(inside))
            content += after
        content = self._specials.remove(content)
        return content.strip() if calls else content, calls

    # --------------------------------------------------------------------------------------------- internal

    def _end_ids(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        eos = generation_config.get("eos_token_id")
        eos = [] if eos is None else eos
        ids: list[Any] = list(eos) if isinstance(eos, list) else [eos]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"generation_config.json: eos_token_id must be a token's id or a list, not {quoted(eos)}")
        own = self._full.token_to_id(self._variables.get("eos_token", ""))
        if own is not None and own not in ids:
            ids.append(own)
        if not ids:
            raise ValueError(
                "no end-of-turn token: generation_config.json has no eos_token_id, the tokenizer no eos_token"
            )
        return tuple(ids)

    def _render_text(
        self, messages: list[Any], tools: list[Any], add_generation_prompt: bool, kwargs: Mapping[str, Any] = {}
    ) -> str:
        ours: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=messages, **ours, **self._variables, **kwargs)
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        for special, piece in self._specials.split(text):
            if special is None:
                ids += self.encode(piece.replace(mark, ""))
            else:
                ids.append(special)
        return ids

    def _suffix(
        self, talk: Sequence[ChatMessage], replies: Sequence[ChatMessage], tools: Sequence[ChatMessage] = ()
    ) -> list[int] | None:
        """render(talk + replies) minus render(talk) up to its last end-of-turn token; None if not a prefix."""
        before = self.render(talk, tools, add_generation_prompt=False)
        after = self.render([*talk, *replies], tools)
        ends = [i for i, token in enumerate(before) if token in self.end_of_turn_ids]
        if not ends:
            return None
        cut = ends[-1] + 1
        return after[cut:] if after[:cut] == before[:cut] else None

    def _check_against_plain_rendering(self) -> None:
        """Raises ValueError if a harmless conversation, also with tools unless the template refuses it, gets ids that differ
        from Hugging Face's or that the base model lacks."""
        for messages, tools in HARMLESS:
            try:
                expected = self._plain_ids(messages, tools)
            except ValueError:
                if not tools:
                    raise
                continue
            if self.render(messages, tools) != expected:
                raise ValueError(
                    "this base model's tokenizer cannot be rendered safely: its special tokens depend on context"
                )
            if (largest := max(expected, default=0)) >= self.vocab_size:
                raise ValueError(
                    f"the tokenizer makes a token {largest}, and config.json has a vocab_size of {self.vocab_size}"
                )

    def _plain_ids(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage]) -> list[int]:
        """The ids that Hugging Face's tokenizer gives what the template makes of a conversation."""
        normal = [normal_message(message, "messages") for message in messages]
        text = self._render_text(normal, [normal_tool(tool, "tools") for tool in tools], True)
        return self._full.encode(text, add_special_tokens=False).ids


def _num_tools(messages: Sequence[ChatMessage]) -> int:
    return sum(message["role"] == "tool" for message in messages)


class StreamDecoder:
    """Text from ids as they come. The pieces, `finish` included, join to the decoding of all ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of a list of ids."""
        self._decode = decode
        self._ids: list[int] = []
        """Ids from the last emitted piece on: some decoders need the one before to place a space."""
        self._num_read = 0
        """Number of `_ids` that were emitted."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is unfinished."""
        self._ids += ids
        piece = self._unread()
        if piece.endswith("\ufffd"):
            return self._undecodable() if len(self._ids) - self._num_read > MAX_HELD_BACK else ""
        if piece:
            self._ids = self._ids[self._num_read :]
            self._num_read = len(self._ids)
        return piece

    def _undecodable(self) -> str:
        """The text of bytes that no further id completes, up to the last place where a cut changes nothing."""
        whole, before = self._decode(self._ids), self._decode(self._ids[: self._num_read])
        for cut in range(len(self._ids) - 1, self._num_read, -1):
            text = self._decode(self._ids[:cut])
            if text + self._decode(self._ids[cut:]) == whole:
                self._ids, self._num_read = self._ids[self._num_read :], cut - self._num_read
                return text[len(before) :]
        return ""

    def finish(self) -> str:
        """Returns the text that was held back, an unfinished character as U+FFFD."""
        piece = self._unread()
        self._ids, self._num_read = [], 0
        return piece

    def _unread(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._num_read])) :]
