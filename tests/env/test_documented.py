"""The environments that the documentation shows, to be copied, are played."""

import re
from pathlib import Path
from typing import Any

from common.text.tool_calls import ToolCall
from env_service.environment import Turn

DOCS = Path(__file__).resolve().parents[2] / "docs"


def defined(page: str, file: str) -> dict[str, Any]:
    """The names that the block with this file's name defines."""
    (code,) = re.findall(rf"```python\n# {file}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


async def test_the_one_of_two_methods() -> None:
    guessing = defined("environments.md", "guessing.py")["Guessing"](largest=4)
    item = guessing.make_item(8, held_out=False)
    state, messages = guessing.reset(item, 1)
    assert messages == [{"role": "user", "content": "guess 0 to 4"}]
    step = await guessing.step(state, Turn(item=item, text="2"))
    assert not step.done and step.messages[0]["role"] in guessing.reply_roles
    assert (await guessing.step(step.state, Turn(item=item, text="3"))).reward == 1.0
    assert (await guessing.step(step.state, Turn(item=item, text="2", last=True))).reward == 0.0


async def test_the_one_with_a_tool() -> None:
    prices = defined("environments.md", "prices.py")["Prices"]()
    item = {"messages": [{"role": "user", "content": "What is a pen?"}], "prices": {"pen": "3"}, "answer": "3"}
    state, messages = prices.reset(item, 1)
    assert messages == item["messages"] and prices.tools[0]["function"]["name"] == "price_of"
    call = ToolCall(name="price_of", arguments={"name": "pen"})
    step = await prices.step(state, Turn(item=item, text="", calls=(call,)))
    assert not step.done and step.messages == [{"role": "tool", "content": "3"}]
    assert (await prices.step(state, Turn(item=item, text="3"))).reward == 1.0


async def test_the_one_for_trl() -> None:
    session = await defined("environments.md", "our_environments.py")["Counting"](largest=3).open({}, 5)
    assert session.messages == [{"role": "user", "content": "Count to 3."}]
    step = await session.step(Turn(item={}, text="", calls=(ToolCall(name="increment", arguments={"step": 2}),)))
    assert not step.done and step.messages[0]["content"] == "The count is 2."
    assert (await session.step(Turn(item={}, text="done"))).parts == {"how_far": -1.0}
