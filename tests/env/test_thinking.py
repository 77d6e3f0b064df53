"""Variables of the chat template: a job's values reach every rendering of its trajectories."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidInput
from common.tasks.environments import SUPERVISED
from common.text.tokens import ChatTokenizer
from common.wire.messages import EnvSpec, Start, TurnRequest
from env_service import work
from env_service.conversation import Conversation
from tests.env.test_env_handler import CALL, EXACT, Run, start_of
from tests.env.test_model_graders import SCORE
from tests.support.thinking import thinking_base

NO_THOUGHT = {"enable_thinking": False}


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(thinking_base(tmp_path / "base"))


def told(name: str, args: dict[str, Any], **changes: Any) -> Start:
    return start_of(name, env=EnvSpec(name, args, NO_THOUGHT), **changes)


def shown(request: Any, tokenizer: ChatTokenizer) -> str:
    assert isinstance(request, TurnRequest), request
    return tokenizer.decode(request.tokens.numpy().tolist(), skip_special=False)


async def test_every_turn_of_a_trajectory_begins_as_the_job_says(tokenizer: ChatTokenizer) -> None:
    run = Run(tokenizer=tokenizer)
    first = await run.first(told("calculator", {"grader": EXACT}))
    assert shown(first, tokenizer).endswith("<|assistant|>()\n")
    _, second = await run.turn(first, CALL)
    assert shown(second, tokenizer).endswith("<|tool|>29842<|end|><|assistant|>()\n")


async def test_an_example_is_learned_after_an_empty_thought(tokenizer: ChatTokenizer) -> None:
    item = {"messages": [{"role": "user", "content": "min 3,1"}, {"role": "assistant", "content": "()\n1"}]}
    [(_, scored)] = await Run(tokenizer=tokenizer).handle(told(SUPERVISED, {}, item=item))
    assert scored.output_text == "1"  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_graders_model_is_asked_as_the_grader_says(tokenizer: ChatTokenizer) -> None:
    run = Run(tokenizer=tokenizer)
    for more, end in (({}, "<|assistant|>"), ({"chat_template_kwargs": NO_THOUGHT}, "<|assistant|>()\n")):
        first = await run.first(start_of("single_turn", {"grader": SCORE | more}))
        _, asked = await run.turn(first, "5<|end|>")
        assert shown(asked, tokenizer).endswith(end)


async def test_an_environment_that_renders_itself_cannot_be_told(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer, work.Threads())
    assert await conversation.opening([], [], [1, 2]) == [1, 2]
    with pytest.raises(InvalidInput, match="chat_template_kwargs: this environment renders its prompts itself"):
        await conversation.told(EnvSpec("e", {}, NO_THOUGHT)).opening([], [], [1, 2])
