"""The tool of the environment `python`: runs code in the sandbox and returns what it prints."""

from common.tasks.environments import PythonArgs
from env_service.environments.tool_loop import Tool
from env_service.failures import ToolFailed
from env_service.sandbox.sandbox import Sandbox

QUEUE_S = 600.0
"""Seconds that a call may wait for a place in the sandbox; its own limit begins after that."""


def python_tool(args: PythonArgs, sandbox: Sandbox) -> Tool:
    most = args.max_output_characters

    async def run(code: str, timeout_s: float) -> str:
        """Returns the output of the code, and its error. Raises ToolFailed for a wall-clock limit: no answer may tell of it."""
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
