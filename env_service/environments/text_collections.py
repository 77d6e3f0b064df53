"""Text collections that can be searched (BM25): the operator's files, or documents that a job brings."""

import asyncio
import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidInput
from common.sharing.places import SPARE_PLACES, Places
from common.tasks.environments import Document
from env_service import work

MAX_COLLECTION_BYTES = 256 * 1024 * 1024
MAX_KEPT_CHARACTERS = 2 * MAX_COLLECTION_BYTES
"""Characters of the texts of all collections whose indexes are in memory."""
MAX_QUERY_WORDS = 64
MAX_POSTINGS = 4_000_000
"""Read for a query, some 50 ms: those of its rarest words, which weigh most."""
THREADS = 2
BUILD_S = 600.0
"""The longest wait for an index: MAX_COLLECTION_BYTES take a minute or two, one index at a time."""

_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")


class Index:
    """A collection that can be searched. Built once; reading is safe from many threads.

    BM25: Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009; with k1 = 1.5 and b = 0.75.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.num_characters = sum(len(document.text) for document in documents)
        self._documents = documents
        postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = np.zeros(len(documents))
        for number, document in enumerate(documents):
            words = _words(document.text)
            lengths[number] = len(words)
            for word, count in Counter(words).items():
                postings[word].append((number, count))
        self._norms = _K1 * (1 - _B + _B * lengths / (lengths.mean() if lengths.any() else 1.0))
        self._postings = {word: np.array(found, np.int32) for word, found in postings.items()}
        """Word -> [P, 2]: a document, and how often it has the word; in the order of documents."""

    def search(self, query: str, top_k: int) -> list[Document]:
        """The best documents, best first; ties in the collection's order; none without a common word."""
        scores = np.zeros(len(self._documents))
        for postings in self._read_for(query):
            numbers, counts = postings[:, 0], postings[:, 1]
            scores[numbers] += self._weight(len(postings)) * counts * (_K1 + 1) / (counts + self._norms[numbers])
        return [self._documents[number] for number in _best(scores, top_k)]

    def _read_for(self, query: str) -> list[NDArray[np.int32]]:
        """The postings of the query's words, the rarest first."""
        words = dict.fromkeys(_words(query)[:MAX_QUERY_WORDS])
        postings = sorted((self._postings[word] for word in words if word in self._postings), key=len)
        ends = np.cumsum([len(each) for each in postings])
        return [each for each, end in zip(postings, ends, strict=True) if end <= MAX_POSTINGS or each is postings[0]]

    def _weight(self, num_documents: int) -> float:
        return float(np.log1p((len(self._documents) - num_documents + 0.5) / (num_documents + 0.5)))


def _best(scores: NDArray[np.float64], top_k: int) -> list[int]:
    numbers = np.flatnonzero(scores)
    if len(numbers) > top_k:
        least = np.partition(scores[numbers], -top_k)[-top_k]
        numbers = numbers[scores[numbers] >= least]
    return numbers[np.argsort(-scores[numbers], kind="stable")][:top_k].tolist()


class Collections:
    """The operator's collections, indexed at the first search, in threads that tenants share by weight."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._indexes: OrderedDict[Path, asyncio.Future[Index]] = OrderedDict()  # the last used last
        self._places = Places(lambda: THREADS)
        self._threads = ThreadPoolExecutor(THREADS + SPARE_PLACES, "collections")
        self._builder = ThreadPoolExecutor(1, "index")

    async def index(self, name: str) -> Index:
        """Waits until a collection is indexed. Raises InvalidInput for an unknown name, TimeoutError after BUILD_S."""
        async with work.time_limit(BUILD_S):
            return await asyncio.shield(self._index(find_collection(name, self._directory)))

    async def search(self, index: Index, query: str, top_k: int) -> list[Document]:
        async with work.place(self._places):
            with work.charged():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, index.search, query, top_k)

    async def close(self) -> None:
        for threads in (self._threads, self._builder):
            threads.shutdown(wait=False, cancel_futures=True)

    def _index(self, path: Path) -> asyncio.Future[Index]:
        index = self._indexes.get(path)
        if index is None or (index.done() and index.exception()):  # its files may be right by now
            index = asyncio.get_running_loop().run_in_executor(self._builder, self._built, path)
            self._indexes[path] = index
        self._indexes.move_to_end(path)
        self._forget()
        return index

    def _built(self, path: Path) -> Index:
        assert self._directory is not None
        return Index(read_collection(path, self._directory))

    def _forget(self) -> None:
        """Drops the collections used longest ago, beyond what memory has room for."""
        built = [
            (path, index.result()) for path, index in self._indexes.items() if index.done() and not index.exception()
        ]
        too_many = sum(index.num_characters for _, index in built) - MAX_KEPT_CHARACTERS
        for path, index in built[:-1]:
            if too_many > 0:
                too_many -= index.num_characters
                del self._indexes[path]


def find_collection(name: str, directory: Path | None) -> Path:
    """A file or folder below the operator's folder. Raises InvalidInput; never looks elsewhere."""
    if directory is None:
        raise InvalidInput("this service has no text collections; give documents instead")
    root = directory.resolve()
    path = (root / name).resolve()
    if path == root or not path.is_relative_to(root) or not path.exists():
        raise InvalidInput(f"there is no text collection {name!r}")
    return path


def read_collection(path: Path, directory: Path) -> list[Document]:
    """The documents of a collection. Raises InvalidInput if it has none, or too many."""
    root = directory.resolve()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    files = [p for p in files if p.resolve().is_relative_to(root) and p.suffix in (".jsonl", ".txt", ".md")]
    if not files or sum(p.stat().st_size for p in files) > MAX_COLLECTION_BYTES:
        raise InvalidInput(f"the text collection {path.name!r} has no .jsonl, .txt or .md file, or is too large")
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
