"""The environment `search`: the tool of that name finds passages in a local text collection (BM25)."""

import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.environments import Document, SearchArgs
from common.errors import InvalidInput
from common.graders import Grader
from env_service.environment import Step, Turn
from env_service.environments.tool_loop import Tool, ToolLoop
from env_service.graders.runner import GraderRunner

MAX_COLLECTION_BYTES = 256 * 1024 * 1024
MAX_QUERY_WORDS = 64

_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")


class Index:
    """A collection that can be searched. Built once; reading is safe from many threads."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Word -> (document, how often) in the order of documents."""
        self._lengths: list[int] = []
        for number, document in enumerate(documents):
            words = _words(document.text)
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._postings[word].append((number, count))
        self._mean_length = sum(self._lengths) / max(1, len(documents)) or 1.0

    def search(self, query: str, top_k: int) -> list[Document]:
        """The best documents, best first; equal ones in the order of the collection; none without a common word."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)[:MAX_QUERY_WORDS]):
            for number, count in self._postings.get(word, ()):
                scores[number] += self._weight(word) * self._saturated(count, self._lengths[number])
        best = sorted(scores, key=lambda number: (-scores[number], number))[:top_k]
        return [self._documents[number] for number in best]

    def _weight(self, word: str) -> float:
        found = len(self._postings[word])
        return math.log(1 + (len(self._documents) - found + 0.5) / (found + 0.5))

    def _saturated(self, count: int, length: int) -> float:
        return count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * length / self._mean_length))


def load_collection(name: str, directory: Path | None) -> list[Document]:
    """The documents of a file or folder below the operator's folder. Raises InvalidInput; never looks elsewhere."""
    if directory is None:
        raise InvalidInput("this service has no text collections; give documents instead")
    root = directory.resolve()
    path = (root / name).resolve()
    if path == root or not path.is_relative_to(root) or not path.exists():
        raise InvalidInput(f"there is no text collection {name!r}")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    files = [p for p in files if p.resolve().is_relative_to(root) and p.suffix in (".jsonl", ".txt", ".md")]
    if not files or sum(p.stat().st_size for p in files) > MAX_COLLECTION_BYTES:
        raise InvalidInput(f"the text collection {name!r} has no .jsonl, .txt or .md file, or is too large")
    return [document for file in files for document in _read(file)]


def _read(file: Path) -> list[Document]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".jsonl":
        return [Document(text=text, id=file.stem)]
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [Document(text=row["text"], id=str(row.get("id", ""))) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{file.name}: each line must be an object with a text") from error


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class Search:
    def __init__(self, args: SearchArgs, grader: Grader, graders: GraderRunner, collections_dir: Path | None) -> None:
        tool = Tool(
            name="search",
            description="Finds passages in the text collection by words.",
            argument="query",
            run=self._run,
        )
        self._args = args
        self._collections_dir = collections_dir
        self._index: Index | None = None
        self._building = asyncio.Lock()
        self._loop = ToolLoop(tool, grader, graders)
        self.tools = self._loop.tools

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return self._loop.reset(item, seed)

    async def step(self, state: None, turn: Turn) -> Step:
        async with self._building:
            if self._index is None and turn.calls and not turn.last:
                self._index = await asyncio.to_thread(self._build)
        return await self._loop.step(state, turn)

    def _build(self) -> Index:
        args = self._args
        return Index(args.documents or load_collection(args.collection, self._collections_dir))

    async def _run(self, query: str, timeout_s: float) -> str:
        assert self._index is not None
        found = await asyncio.to_thread(self._index.search, query, self._args.top_k)
        if not found:
            return "nothing found"
        return "\n".join(self._show(document) for document in found)

    def _show(self, document: Document) -> str:
        text = " ".join(document.text.split())[: self._args.max_characters]
        return f"[{document.id}] {text}" if document.id else text
