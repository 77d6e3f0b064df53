"""Live environments for tests, as a package that an operator installs; and each session's story, one line an event, in a file."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env_service.environment import Step, Turn

NAMES = ("adding",)


class Adding:
    """Adds up what the model says; the sum of the item and of all turns, over 100, is the reward. Only the session knows it."""

    reply_roles = ("user",)

    def __init__(self, turns: int = 3, story: str = "") -> None:
        self._turns = turns
        self._story = story

    async def open(self, item: dict[str, Any], seed: int) -> "AddingSession":
        return AddingSession(item["number"], seed, self._turns, self.tell, self.shown)

    def tell(self, *words: Any) -> None:
        if self._story:
            with open(self._story, "a") as file:
                file.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

    def shown(self, total: int) -> str:
        return str(total)


class AddingSession:
    tools: Sequence[Mapping[str, Any]] = ()
    reply_roles = ("user",)

    def __init__(self, number: int, seed: int, turns: int, tell: Any, shown: Any) -> None:
        self._total = number
        self._turns = turns
        self._tell = tell
        self._shown = shown
        self.messages = [_said(str(number))]
        tell("open", id(self), seed)

    async def step(self, turn: Turn) -> Step:
        if turn.text == "0":
            raise RuntimeError("nothing to add")
        self._total += int(turn.text)
        self._tell("step", id(self))
        if turn.index + 1 == self._turns:
            return Step(done=True, reward=self._total / 100)
        return Step(done=False, messages=[_said(self._shown(self._total))])

    async def end(self) -> Step:
        return Step(done=True, reward=-self._total / 100, parts={"cut": 1.0})

    async def close(self) -> None:
        self._tell("close", id(self))


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"max {text}"}


def install(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """Writes what the installation of a package leaves. Returns the folder, for the path of modules."""
    info = folder / "live_environments-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: live-environments\nVersion: 1\n")
    lines = [f"{name} = {__name__}:{name.title()}" for name in names]
    (info / "entry_points.txt").write_text("[marlaas.environments]\n" + "\n".join(lines) + "\n")
    return folder
