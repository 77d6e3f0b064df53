"""Environments as TRL's `GRPOTrainer(environment_factory=...)` takes them, played in live sessions."""

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from common.errors import InvalidInput
from common.tasks.environments import validate_environment, wants_tools
from common.text.tool_calls import ToolCall
from common.wire.messages import EnvSpec
from env_service.environment import Turn
from env_service.environments.trl_factory import FromTRL, definitions
from env_service.failures import EnvironmentFailed, ToolFailed
from tests.env.test_env_handler import TOKENIZER
from tests.env.test_live_sessions import EnvWorker, live_start

ITEM = {"messages": [{"role": "user", "content": "go:"}], "word": "17"}


class GuessEnv:
    """An environment as in TRL's documentation: no class of TRL's is needed."""

    def __init__(self, most: int = 2) -> None:
        self.left = most
        self.right = False

    def reset(self, **row: Any) -> str | None:
        self.word, self.seed = row.get("word", "17"), row["seed"]
        return f" {len(self.word)} letters"

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: The word: all of its letters,
                in order.

        Returns:
            Whether it is right.
        """
        if not self.left:
            raise ValueError("game over")
        if word == "away":
            raise TimeoutError("no answer")
        self.left -= 1
        self.right = word == self.word
        return "right" if self.right else "wrong"

    async def hint(self, place: int, loud: bool = False) -> str:
        """Shows a letter.

        Args:
            place: Which one.
            loud: In capitals?
        """
        return self.word[place]

    def hang(self) -> None:
        """Never ends."""
        threading.Event().wait(1.0)

    def show(self, function: str) -> list[dict[str, Any]]:
        """Shows a picture.

        Args:
            function: Of what.
        """
        return [{"type": "image", "image": b""}]

    def get_reward(self) -> float:
        return float(self.right)

    def _secret(self) -> None: ...


def short(completions: list[Any], environments: list[GuessEnv], word: list[str], **kwargs: Any) -> list[float | None]:
    """A reward function as TRL calls it."""
    assert [len(environments), len(word)] == [1, 1] and not environments[0].right
    tools = [message for message in completions[0] if message["role"] == "tool"]
    return [-len(tools) / 10 if tools else None]


class Guessing(FromTRL):
    factory = GuessEnv
    job_args = ("most",)


class Exhausted(GuessEnv):
    def get_reward(self) -> float:
        return next(iter([]))


class Exhausting(FromTRL):
    factory = Exhausted


class Shortly(FromTRL):
    factory = GuessEnv
    reward_funcs = (short,)


class Unrewarded(FromTRL):
    @staticmethod
    def factory() -> Any:
        return type("Bare", (), {"reset": lambda self, **row: "go"})()  # pyright: ignore[reportUnknownLambdaType]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "trl_environments-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl-environments\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[marlaas.environments]\nguessing = {__name__}:Guessing\n")
    monkeypatch.syspath_prepend(tmp_path)


def turn(*calls: tuple[str, dict[str, Any]], text: str = "", **changes: Any) -> Turn:
    return Turn(item=ITEM, text=text, calls=tuple(ToolCall(name=n, arguments=a) for n, a in calls), **changes)


async def test_methods_are_tools_and_errors_are_told_as_in_trl(installed: None) -> None:
    validate_environment(EnvSpec("guessing", {"most": 1}))
    assert wants_tools(EnvSpec("guessing", {}))
    with pytest.raises(InvalidInput, match="unknown field 'word'"):
        validate_environment(EnvSpec("guessing", {"word": "17"}))
    # Given a trajectory whose session is lost on its way
    first, second = EnvWorker("a"), EnvWorker("b")
    request = await first.first(live_start("guessing", args={"most": 2}, item=ITEM))
    request = await first.turn(request, "<tool_call>guess:5</tool_call>")
    request = await second.turn(request, "<tool_call>guess:17</tool_call>")
    request = await second.turn(request, "<tool_call>guess:17</tool_call>")
    scored = await second.turn(request, "done")
    text = TOKENIZER.decode(scored.tokens.numpy().tolist())
    assert "go: 2 letters" in text
    assert [text.count(said) for said in ("wrong", "right", "{'error': 'game over'}")] == [1, 1, 1]
    assert (scored.reward, scored.reward_parts, scored.failure) == (1.0, {"GuessEnv": 1.0}, None)


async def test_reward_functions_see_the_environment_and_the_conversation() -> None:
    session = await Shortly().open(ITEM, 5)
    assert not (await session.step(turn(("guess", {"word": "1"}), ("hint", {"place": 1})))).done
    step = await session.step(turn(text="done"))
    assert (step.done, step.reward, step.parts) == (True, -0.2, {"GuessEnv": 0.0, "short": -0.2})
    # One that gives None does not count
    other = await Shortly().open(ITEM, 5)
    assert (await other.step(turn(text="done"))).parts == {"GuessEnv": 0.0}


async def test_what_a_call_cannot_be_is_told_and_the_last_turns_calls_are_not_made() -> None:
    session = await Guessing().open({}, 5)
    assert session.messages == [{"role": "user", "content": " 2 letters"}]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("_secret", {}),
        ("reset", {}),
        ("guess", {}),
        *[("hint", {"place": 0})] * 6,
    ]
    step = await session.step(turn(*calls))
    told = [str(message["content"]) for message in step.messages]
    assert told[:2] == ["{'error': 'Tool _secret not found.'}", "{'error': 'Tool reset not found.'}"]
    assert "missing 1 required positional argument" in told[2]
    assert told[3:] == ["1"] * 5 + ["{'error': 'too many calls'}"]
    assert (await session.step(turn(("guess", {"word": "17"}), last=True))).reward == 0.0


async def test_what_goes_wrong_masks_the_trajectory() -> None:
    session = await Guessing().open(ITEM, 5)
    told = await session.step(turn(("guess", {"word": "away"})))
    assert told.messages[0]["content"] == "{'error': 'no answer'}", "its own time limit, not the job's"
    with pytest.raises(ToolFailed, match=r"the tool hang took longer than 0\.05 seconds"):
        await session.step(turn(("hang", {}), tool_timeout_s=0.05))
    with pytest.raises(EnvironmentFailed, match="images"):
        await session.step(turn(("show", {"function": "x"})))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await (await Exhausting().open(ITEM, 5)).step(turn(text="17"))
    with pytest.raises(InvalidInput, match="no get_reward, and its operator named no reward_funcs"):
        await Unrewarded().open(ITEM, 5)


async def test_what_reset_says_follows_an_items_parts() -> None:
    parts = [{"type": "text", "text": "go:"}]
    session = await Guessing().open({"messages": [{"role": "user", "content": parts}], "word": "17"}, 5)
    assert session.messages[0]["content"] == [*parts, {"type": "text", "text": " 2 letters"}]


def test_tools_are_told_as_trl_tells_them() -> None:
    environment = GuessEnv()
    for tool in definitions(GuessEnv):
        theirs = get_json_schema(getattr(environment, tool["function"]["name"]))
        theirs["function"].pop("return", None)
        assert tool == theirs
