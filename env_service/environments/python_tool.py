"""The environment `python`: the tool of that name runs code in the sandbox and returns what it prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.environments import PythonArgs
from common.graders import Grader
from env_service.environment import Step, Turn, item_messages
from env_service.environments.tool_loop import Tool, ToolLoop
from env_service.failures import ToolFailed
from env_service.graders.runner import GraderRunner
from env_service.sandbox.sandbox import Sandbox

QUEUE_S = 600.0
"""How long a call may wait for a place in the sandbox; its own limit begins after that."""


class Python:
    def __init__(self, args: PythonArgs, grader: Grader, graders: GraderRunner, sandbox: Sandbox) -> None:
        tool = Tool(
            name="python",
            description="Runs Python code in a fresh process without network and returns what it prints.",
            argument="code",
            run=self._run,
            waits_s=QUEUE_S,
        )
        self.tools: Sequence[Mapping[str, Any]] = (tool.definition,)
        self._max_characters = args.max_output_characters
        self._sandbox = sandbox
        self._loop = ToolLoop(tool, grader, graders)

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return None, item_messages(item)

    async def step(self, state: None, turn: Turn) -> Step:
        return await self._loop.step(state, turn)

    async def _run(self, code: str, timeout_s: float) -> str:
        """What the code prints, and its error. A wall-clock limit is never part of the answer: raises ToolFailed."""
        outcome = await self._sandbox.run(code, timeout_s=timeout_s)
        if outcome.ending == "timeout":
            raise ToolFailed(f"the tool python {outcome.reason}")
        output = outcome.output.strip("\n")
        if len(output) > self._max_characters:
            output = output[: self._max_characters] + f"\n[cut at {self._max_characters} characters]"
        parts = [output, f"error: {outcome.reason}" if outcome.reason else ""]
        return "\n".join(filter(None, parts)) or "(no output)"
