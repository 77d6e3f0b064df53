"""A core without a process: scores are a function of the adapter's files and the last tokens; it dies and fails as told.

It passes the same contract tests as `rollout_service.process.vllm_engine.VllmCore`, and has its habits: a turn draws from a stream
of its own seed, what is asked of a dead core never returns, an adapter must be loaded before it is named.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from common.wire.messages import Tops
from rollout_service.process.core import AdapterFolder, CoreDied, SamplingRequest, TokenChunk, UnreadableAdapter

STEP_S = 0.0005


@dataclass
class FakeCore:
    vocab: int
    max_loras: int
    pid: int = 1
    kv_tokens: int | None = None
    unreadable: frozenset[str] = frozenset()  # jobs whose adapters `add` refuses
    poison: frozenset[str] = frozenset()  # jobs whose turns give NaN, and leave it for whoever comes next
    deadly: frozenset[str] = frozenset()  # jobs whose turns end the process
    hangs: bool = False  # gives no token
    fails_to_start: bool = False
    skips_prompts: bool = False  # gives no log-probs of prompts
    prompts_scored: int = 0
    cached: int = 0  # tokens of each request whose keys and values it says that it had
    loaded: dict[int, str] = field(default_factory=dict[int, str])  # number -> digest of the files
    most_loaded: int = 0
    num_added: int = 0
    seeds: list[int | None] = field(
        default_factory=list[int | None]
    )  # of the turns, in the order in which they were asked for
    salts: list[str] = field(default_factory=list[str])  # likewise
    lengths: list[int] = field(default_factory=list[int])  # of what they were asked to go on from, likewise
    by_token: list[bool] = field(default_factory=list[bool])  # likewise
    running: int = 0
    poisoned: bool = False
    named: list[str] = field(default_factory=list[str])  # adapters, in the order in which turns were asked for
    aborted: list[str] = field(default_factory=list[str])
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    wakes: str = "well"  # or: hangs, fails, dies, with other weights, without adapters
    is_asleep: bool = False
    woke: str = ""  # how it woke

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self.fails_to_start:
            raise OSError("no memory")

    async def stop(self) -> None:
        self.dead.set()

    async def wait_dead(self) -> None:
        await self.dead.wait()

    async def add(self, adapter: AdapterFolder) -> None:
        await self._answer()
        assert not self.is_asleep
        if _job(adapter) in self.unreadable:
            raise UnreadableAdapter("not for me")
        assert adapter.number not in self.loaded
        assert adapter.folder.is_dir(), "the folder went while a request names the adapter"
        files = b"".join(file.read_bytes() for file in sorted(adapter.folder.iterdir()))
        self.loaded[adapter.number] = hashlib.sha256(files).hexdigest()
        self.num_added += 1
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        assert len(self.loaded) <= self.max_loras, "more adapters than slots"

    async def remove(self, adapter: AdapterFolder) -> None:
        await self._answer()
        assert not self.is_asleep
        del self.loaded[adapter.number]

    async def sleep(self) -> None:
        await self._answer()
        assert not self.running, "a turn is under way"
        self.is_asleep, self.loaded = True, {}

    async def wake(self) -> None:
        if self.wakes == "hangs":
            await asyncio.Event().wait()
        if self.wakes == "fails":
            raise CoreDied("no memory")
        if self.wakes == "dies":
            self.dead.set()
        await self._answer()
        self.is_asleep, self.woke = False, self.wakes

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        self.named.append(request.adapter.name)
        self.seeds.append(request.seed)
        self.salts.append(request.salt)
        self.by_token.append(request.by_token)
        self.lengths.append(len(request.tokens))
        digest, tokens = self._digest(request.adapter), list(request.tokens)
        random = np.random.default_rng(request.seed)
        self.running += 1
        try:
            prompt_logprobs, prompt_tops = self._of_prompt(request, digest)
            for left in range(request.max_tokens - 1, -1, -1):
                await self._step(request)
                chunk = self._next(request, digest, tokens, random, last=left == 0)
                of_prompt = {"prompt_logprobs": prompt_logprobs, "prompt_top_logprobs": prompt_tops}
                chunk = dataclasses.replace(chunk, **of_prompt, num_cached=self.cached)
                tokens, prompt_logprobs, prompt_tops = tokens + chunk.tokens, [], []
                yield chunk
                if chunk.finished:
                    return
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.id)
            raise
        finally:
            self.running -= 1

    def _digest(self, adapter: AdapterFolder) -> str:
        assert not self.is_asleep
        digest = self.loaded[adapter.number]
        if self.woke == "without adapters":  # as if each were the first, which changes nothing
            digest = next(iter(self.loaded.values()))
        return f"{digest} of others" if self.woke == "with other weights" else digest

    async def _step(self, request: SamplingRequest) -> None:
        await asyncio.sleep(STEP_S)
        if _job(request.adapter) in self.deadly:
            self.dead.set()
        if self.hangs:
            await asyncio.Event().wait()
        await self._answer()

    async def _answer(self) -> None:
        """A dead process never answers."""
        await asyncio.sleep(0)
        if self.dead.is_set():
            await asyncio.Event().wait()
            raise CoreDied("unreachable")

    def _of_prompt(self, request: SamplingRequest, digest: str) -> tuple[list[float], Tops]:
        if not request.prompt_logprobs or self.skips_prompts:
            return [], []
        self.prompts_scored += 1
        tokens = request.tokens
        rows = [_logprobs(digest, tokens[:i], self.vocab, 1.0).astype(np.float32) for i in range(1, len(tokens))]
        tops = [[(int(t), float(row[t])) for t in np.argsort(-row)[: request.num_top_logprobs]] for row in rows]
        return [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)], tops

    def _next(
        self, request: SamplingRequest, digest: str, tokens: list[int], random: np.random.Generator, *, last: bool
    ) -> TokenChunk:
        self.poisoned |= _job(request.adapter) in self.poison
        logprobs = _logprobs(digest, tokens, self.vocab, request.temperature or 1.0)
        best = np.argsort(-logprobs)
        token = int(best[0])
        if request.temperature:
            kept = best[: request.top_k or self.vocab]
            shares = np.exp(logprobs[kept])
            enough = shares.cumsum() - shares >= request.top_p * shares.sum()
            kept, shares = kept[~enough], shares[~enough]
            token = int(random.choice(kept, p=shares / shares.sum()))
        top = [(int(t), float(logprobs[t])) for t in best[: request.num_top_logprobs]]
        logprob = float("nan") if self.poisoned else float(np.float32(logprobs[token]))  # as it travels
        return TokenChunk([token], [logprob], [top] if top else [], last or token in request.end_ids)


def _logprobs(digest: str, tokens: list[int], vocab: int, temperature: float) -> np.ndarray:
    """[vocab] Turns of a dozen tokens are the rule: the special tokens, the last ids, become likely with the length."""
    seed = hashlib.sha256(f"{digest}/{tokens[-4:]}/{len(tokens)}".encode()).digest()
    scores = np.random.default_rng(int.from_bytes(seed[:8], "little")).normal(0.0, 2.0, vocab)
    scores[256] += min(len(tokens), 40) / 10
    scores = (scores - scores.max()) / temperature
    return scores - np.log(np.exp(scores).sum())


def _job(adapter: AdapterFolder) -> str:
    """The job from a name such as `tenant/job@3#7`."""
    return adapter.name.partition("/")[2].partition("@")[0].partition("#")[0]
