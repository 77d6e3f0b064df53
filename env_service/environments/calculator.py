"""The environment `calculator`: arithmetic that is too hard without the tool of that name."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidInput
from common.tasks import formula, skills
from common.tasks.environments import CalculatorArgs
from common.tasks.graders import Grader
from env_service.environment import Step, Turn
from env_service.environments.tool_loop import Tool, ToolLoop
from env_service.graders.runner import GraderRunner

MAX_REPLY_CHARACTERS = 200


async def calculate(expression: str, timeout_s: float) -> str:
    """Returns the value of an expression, or `error: ` and the reason. Its work is bounded, so it needs no time limit."""
    try:
        value = formula.show(formula.evaluate(expression))
    except InvalidInput as error:
        return f"error: {error}"
    return value if len(value) <= MAX_REPLY_CHARACTERS else "error: the number is too large"


CALCULATOR = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression such as 347*86.",
    argument="expression",
    run=calculate,
)


class Calculator:
    def __init__(self, args: CalculatorArgs, grader: Grader, graders: GraderRunner) -> None:
        self._skill = args.skill
        self._loop = ToolLoop(CALCULATOR, grader, graders)
        self.tools = self._loop.tools

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        """One question, the same for the same seed."""
        return skills.generate(self._skill, seed, 1, "held_out" if held_out else "train")[0]

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return self._loop.reset(item, seed)

    async def step(self, state: None, turn: Turn) -> Step:
        return await self._loop.step(state, turn)
