"""The environment `search`: the tool of that name finds passages in a text collection."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.tasks.environments import Document, SearchArgs
from common.tasks.graders import Grader
from env_service.environment import Step, Turn
from env_service.environments.text_collections import Collections, Index
from env_service.environments.tool_loop import Tool, ToolLoop
from env_service.graders.runner import GraderRunner


class Search:
    def __init__(self, args: SearchArgs, grader: Grader, graders: GraderRunner, collections: Collections) -> None:
        tool = Tool(
            name="search",
            description="Finds passages in the text collection by words.",
            argument="query",
            run=self._run,
        )
        self._args = args
        self._collections = collections
        self._index: Index | None = None
        self._loop = ToolLoop(tool, grader, graders)
        self.tools = self._loop.tools

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return self._loop.reset(item, seed)

    async def step(self, state: None, turn: Turn) -> Step:
        if turn.calls and not turn.last:  # here, not within the tool's time limit
            self._index = await self._indexed()
        return await self._loop.step(state, turn)

    async def _run(self, query: str, timeout_s: float) -> str:
        assert self._index is not None
        found = await self._collections.search(self._index, query, self._args.top_k)
        if not found:
            return "nothing found"
        return "\n".join(self._show(document) for document in found)

    async def _indexed(self) -> Index:
        if not self._args.documents:
            return await self._collections.index(self._args.collection)
        return self._index or Index(self._args.documents)  # few

    def _show(self, document: Document) -> str:
        text = " ".join(document.text.split())[: self._args.max_characters]
        return f"[{document.id}] {text}" if document.id else text
