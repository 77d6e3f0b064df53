"""Examples of supervised jobs as tokens, on the tiny tokenizer."""

from typing import Any

import pytest

from common.settings import TINY
from common.text.examples import Example, check_example, is_example, read_example
from common.text.tokens import ChatTokenizer

TOKENIZER = ChatTokenizer.load(TINY)
END = TOKENIZER.end_of_turn_ids[0]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def learned(example: Example) -> str:
    assert len(example.tokens) == len(example.written)
    return TOKENIZER.decode([t for t, written in zip(*example, strict=True) if written], skip_special=False)


def test_the_answer_is_learned_from_where_a_rollout_begins_to_the_token_that_ends_it() -> None:
    asked = [user("min 3,1,2")]
    example = read_example({"messages": [*asked, assistant("1")]}, TOKENIZER)
    prompt = TOKENIZER.render(asked)
    assert example.tokens == [*prompt, *TOKENIZER.encode("1"), END]
    assert example.written == [0] * len(prompt) + [1, 1]


def test_every_turn_of_the_assistant_is_learned_but_those_of_weight_0() -> None:
    talk = [user("a"), assistant("one", weight=0), user("b"), assistant("two"), user("c"), assistant("three", weight=1)]
    assert learned(read_example({"messages": talk}, TOKENIZER)) == "two<|end|>three<|end|>"
    turns = [{**message, "weight": 1} for message in talk]
    assert learned(read_example({"messages": turns}, TOKENIZER)) == "one<|end|>two<|end|>three<|end|>"


def test_tool_calls_are_learned_and_their_replies_are_not() -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3*4"}'}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
    reply = {"role": "tool", "tool_call_id": "x", "content": "12"}
    talk = [user("calc 3*4"), {"role": "assistant", "content": None, "tool_calls": [call]}, reply, assistant("12")]
    example = read_example({"messages": talk, "tools": tools}, TOKENIZER)
    assert learned(example) == "<tool_call>calculator:3*4</tool_call><|end|>12<|end|>"
    assert "<|tools|>calculator" in TOKENIZER.decode(example.tokens, skip_special=False)


def test_of_prompt_and_completion_the_completion_is_learned() -> None:
    turns = [user("a"), assistant("one"), user("b")]
    example = read_example({"prompt": turns, "completion": [assistant("two")]}, TOKENIZER)
    assert learned(example) == "two<|end|>"
    assert example.tokens == read_example({"messages": [*turns, assistant("two")]}, TOKENIZER).tokens
    plain = read_example({"prompt": "2 + 2 =", "completion": " 4<|end|>"}, TOKENIZER)
    assert plain.tokens == [*TOKENIZER.encode("2 + 2 = 4<|end|>"), END], "text stays text"
    assert sum(plain.written) == len(TOKENIZER.encode(" 4<|end|>")) + 1


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"messages": [assistant("x")]}, "before the assistant's first message"),
        ({"messages": [user("x"), assistant("y", weight=0)]}, "no message of the assistant is to be learned"),
        ({"messages": [user("x"), assistant("y", weight=2)]}, r"messages\[1\].weight must be 0 or 1"),
        ({"prompt": [user("x")], "completion": [user("y")]}, "the last message must be the assistant's"),
        ({"prompt": "x", "completion": ""}, "not empty"),
        ({"prompt": [user("x")], "completion": "y"}, "both be text"),
        ({"prompt": "x", "completion": [assistant("y")]}, "prompt must be a list"),
        ({"completion": [assistant("y")]}, "prompt must be a list"),
        ({"prompt": ["x"], "completion": [assistant("y")]}, "prompt must be a list of messages"),
        ({"messages": [user("x"), assistant("y")], "tools": {}}, "tools must be a list"),
        ({"messages": [user("x"), assistant("y")], "tools": [1]}, r"tools\[0\]"),
        ({"messages": [user("x"), {"role": "assistant", "content": 3}]}, r"messages\[1\].content"),
        ({"messages": [*([user("x"), assistant("y")] * 65)]}, "at most 32"),
    ],
)
def test_what_is_no_example_is_named(item: dict[str, Any], reason: str) -> None:
    assert is_example(item)
    with pytest.raises(ValueError, match=reason):
        check_example(item)


def test_an_item_to_answer_is_no_example() -> None:
    assert not is_example({"messages": [user("x")]}) and not is_example({"messages": []}) and not is_example({})
    assert not is_example({"messages": "x"}) and not is_example({"messages": ["x"]})


def test_a_turn_that_the_template_changes_later_is_refused_with_what_to_do() -> None:
    class Thinking(ChatTokenizer):
        """Shows the last turn with a thought, as Qwen3's template does."""

        def render(self, messages: Any, tools: Any = (), *, add_generation_prompt: bool = True) -> list[int]:
            ids = super().render(messages[:-1], tools, add_generation_prompt=False)
            last = super().render(messages[-1:], add_generation_prompt=add_generation_prompt)
            thought = [] if add_generation_prompt else self.encode("hm")
            return [*ids, *last[:1], *thought, *last[1:]]

    tokenizer = object.__new__(Thinking)  # `load` refuses a template that shows turns in this way
    tokenizer.__dict__.update(TOKENIZER.__dict__)
    talk = [user("a"), assistant("one"), user("b"), assistant("two")]
    with pytest.raises(ValueError, match=r"messages\[1\]: the chat template shows this turn otherwise"):
        read_example({"messages": talk}, tokenizer)
    assert "two" in learned(read_example({"messages": [talk[0], assistant("one", weight=0), *talk[2:]]}, tokenizer))
