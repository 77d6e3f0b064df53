"""The built-in environments with a tool: `calculator`, `python`, `search`."""

from typing import Any

from common.errors import InvalidInput
from common.tasks import formula, skills
from common.tasks.environments import CalculatorArgs, Document, PythonArgs, SearchArgs
from common.tasks.graders import Grader
from env_service.environment import Step, Turn
from env_service.environments.text_collections import Collections, Index
from env_service.environments.tool_loop import Tool, ToolLoop
from env_service.failures import ToolFailed
from env_service.graders.runner import GraderRunner
from env_service.sandbox.sandbox import Sandbox

MAX_REPLY_CHARACTERS = 200
QUEUE_S = 600.0
"""Seconds that a call may wait for a place in the sandbox; its own limit begins after that."""


async def calculate(expression: str, timeout_s: float) -> str:
    """Returns the value of an expression, or `error: ` and the reason, in bounded time."""
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


class Calculator(ToolLoop):
    """Arithmetic that is too hard without the tool."""

    def __init__(self, args: CalculatorArgs, grader: Grader, graders: GraderRunner) -> None:
        super().__init__(CALCULATOR, grader, graders)
        self._skill = args.skill

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        """One question, the same for the same seed."""
        return skills.generate(self._skill, seed, 1, "held_out" if held_out else "train")[0]


def python_tool(args: PythonArgs, sandbox: Sandbox) -> Tool:
    """The tool of the environment `python`: runs code in the sandbox and returns what it prints."""
    most = args.max_output_characters

    async def run(code: str, timeout_s: float) -> str:
        """Returns the code's output and error. Raises ToolFailed for a wall-clock limit, which no answer may tell of."""
        outcome = await sandbox.run(code, timeout_s=timeout_s)
        if outcome.ending == "timeout":
            raise ToolFailed(f"the tool python {outcome.reason}")
        output = outcome.output.strip("\n")
        if len(output) > most:
            output = output[:most] + f"\n[cut at {most} characters]"
        parts = [output, f"error: {outcome.reason}" if outcome.reason else ""]
        return "\n".join(filter(None, parts)) or "(no output)"

    description = "Runs Python code in a fresh process without network and returns what it prints."
    return Tool(name="python", description=description, argument="code", run=run, waits_s=QUEUE_S)


class Search(ToolLoop):
    """Questions about a text collection, in which the tool finds passages."""

    def __init__(self, args: SearchArgs, grader: Grader, graders: GraderRunner, collections: Collections) -> None:
        description = "Finds passages in the text collection by words."
        tool = Tool(name="search", description=description, argument="query", run=self._search)
        super().__init__(tool, grader, graders)
        self._args = args
        self._collections = collections
        self._index: Index | None = None

    async def step(self, state: None, turn: Turn) -> Step:
        if turn.calls and not turn.last:  # here, not within the tool's time limit
            self._index = await self._indexed()
        return await super().step(state, turn)

    async def _search(self, query: str, timeout_s: float) -> str:
        assert self._index is not None
        documents = await self._collections.search(self._index, query, self._args.top_k)
        return "\n".join(self._show(document) for document in documents) or "nothing found"

    async def _indexed(self) -> Index:
        if not self._args.documents:
            return await self._collections.index(self._args.collection)
        return self._index or Index(self._args.documents)  # few

    def _show(self, document: Document) -> str:
        text = " ".join(document.text.split())[: self._args.max_characters]
        return f"[{document.id}] {text}" if document.id else text
