"""The jobs of four tenants: single turns, tools, long answers, and all of these. Each is submitted again when it has ended.

A recipe is one job with a fixed seed, so that in deterministic mode every run of it must give the same bytes. A fifth tenant deserts its
runs of the Tinker protocol.
"""

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from chaos.deserter import NUM_RUNS
from common.tasks.skills import WORDS, generate
from harness.live import ALIKE, CALCULATOR, FINAL, GRADER, jsonl

POLL_S, RETRY_S = 0.5, 0.3
TIMEOUT_S = 15.0
BEGINS_S, SERVES_S = 20.0, 4.0
"""Time that a deserter has to begin, and before it is killed."""
STEPS, BATCH, GROUP = 4, 2, 4
SIZE = {"max_steps": STEPS, "batch_size": BATCH, "group_size": GROUP}
OWN_CODE = {
    "type": "python",
    "name": "own code",
    "source": "def grade(sample, item):\n    return float(sample['output_text'].strip() == item['answer'])\n",
}
LONG = "long"
LONG_TOKENS = 160
LARGE_RANK = 32
"""The rank of adapters that rollout workers pass on to each other: smaller ones have no parts."""


class Unplanned(Exception):
    """The service answered something that no fault explains."""


class Client:
    """One key's view of the API."""

    def __init__(self, urls: list[str], key: str) -> None:
        self.key = key
        self._urls = list(urls)
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The first answer that is no error of the service's own (5xx), however long it takes to come."""
        return await self._patiently(method, f"/v1{path}", **options)

    async def tinker(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The same of the Tinker protocol."""
        return await self._patiently(method, f"/api/v1{path}", **options)

    async def _patiently(self, method: str, path: str, **options: Any) -> httpx.Response:
        while True:
            try:
                answer = await self._http.request(method, self._urls[0] + path, **options)
                if answer.status_code < 500:
                    return answer
            except httpx.TransportError:
                pass
            self._urls.append(self._urls.pop(0))
            await asyncio.sleep(RETRY_S)

    async def get(self, path: str, **params: Any) -> Any:
        """None if there is no such thing. Raises Unplanned for every other refusal."""
        answer = await self.call("GET", path, params=params)
        return None if answer.status_code == 404 else _good(answer)

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        """Raises Unplanned for a refusal."""
        return _good(await self.call("POST", path, json=body, headers=headers))

    async def upload(self, name: str, content: bytes) -> str:
        """Id of a new file of items. Raises Unplanned."""
        options: Any = {"files": {"file": (name, content)}, "data": {"purpose": "fine-tune"}}
        return _good(await self.call("POST", "/files", **options))["id"]

    async def pages(self, path: str) -> list[Any]:
        """All rows of a list, newest first."""
        rows, more = list[Any](), {"limit": "100"}
        while True:
            page = await self.get(path, **more)
            rows += page["data"]
            if not page["has_more"]:
                return rows
            more["after"] = rows[-1]["id"]


def _good(answer: httpx.Response) -> Any:
    if answer.status_code >= 400:
        raise Unplanned(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:300]}")
    return answer.json()


# ---- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    tenant: str
    skill: str
    how: Mapping[str, Any]
    hyper: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return f"{self.tenant} {self.skill}"

    @property
    def num_trajectories(self) -> int:
        """Trajectories of each step."""
        return BATCH * GROUP


RECIPES = (
    Recipe("single", "sort", {"grader": GRADER}),
    Recipe("single", "add", {"grader": OWN_CODE}, {"loss": "rloo", "lora_rank": 4}),
    Recipe("tool", "calc", {"environment": CALCULATOR}),
    Recipe("long", LONG, {"grader": ALIKE}, {"max_tokens": LONG_TOKENS}),
    Recipe("all", "max", {"grader": {"type": "math"}}, {"loss": "dapo"}),
    Recipe("all", "calc", {"environment": CALCULATOR}, {"max_staleness": 0, "lora_rank": LARGE_RANK}),
    Recipe("all", LONG, {"grader": ALIKE}, {"max_tokens": LONG_TOKENS, "loss": "cispo"}),
)
FEW = (RECIPES[0], RECIPES[2], RECIPES[4])
"""Short ones, of three tenants."""


@dataclass
class Run:
    """One job of a recipe."""

    recipe: Recipe
    id: str
    job: Any = None  # as the API showed it last
    forgotten: bool = False  # a replica that took Redis' place had never heard of it


def items(skill: str) -> list[dict[str, Any]]:
    """Rows of a training file; the model never ends its answers to those of `long` soon."""
    if skill != LONG:
        return generate(skill, 1, 64)
    words = ["".join(WORDS[n : n + 8]) for n in range(64)]
    return [{"messages": [{"role": "user", "content": f"reverse {word}"}], "answer": word[::-1]} for word in words]


class Tenant:
    """Keeps its recipes' jobs coming until `stop` is set."""

    def __init__(self, name: str, client: Client, recipes: Sequence[Recipe]) -> None:
        self.name = name
        self.client = client
        self.recipes = recipes
        self.runs: list[Run] = []
        self._files: dict[str, str] = {}

    async def prepare(self) -> None:
        """Uploads its files."""
        for recipe in self.recipes:
            self._files[recipe.skill] = await self.client.upload(f"{recipe.skill}.jsonl", jsonl(items(recipe.skill)))

    async def work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            for recipe in self.recipes:
                group.create_task(self._repeat(recipe, stop))

    async def _repeat(self, recipe: Recipe, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            run = await self._submit(recipe, number)
            await self.follow(run)

    async def _submit(self, recipe: Recipe, number: int) -> Run:
        body = {
            "model": "tiny",
            "seed": 7,
            "suffix": recipe.skill,
            "training_file": self._files[recipe.skill],
            "method": {
                "type": "reinforcement",
                "reinforcement": {**recipe.how, "hyperparameters": {**SIZE, **recipe.hyper}},
            },
        }
        key = {"Idempotency-Key": f"{recipe.name} {number}"}
        run = Run(recipe, (await self.client.post("/fine_tuning/jobs", body, **key))["id"])
        self.runs.append(run)
        return run

    async def follow(self, run: Run) -> None:
        """Returns once the job has ended, or is forgotten."""
        while True:
            found = await self.client.get(f"/fine_tuning/jobs/{run.id}")
            run.forgotten = found is None
            run.job = found or run.job
            if found is None or found["status"] in FINAL:
                return
            await asyncio.sleep(POLL_S)

    async def settle(self) -> None:
        """Follows all jobs once more: a replica may have forgotten that one had ended."""
        for run in self.runs:
            await self.follow(run)


# ---- deserted runs --------------------------------------------------------------------------------------------------


class Deserted:
    """A tenant whose clients are killed, with runs, operations and samples under way."""

    def __init__(
        self, client: Client, urls: Sequence[str], age: Callable[[str], Awaitable[bool]], chance: random.Random
    ) -> None:
        """`urls`: of the managers; each client is given one, by `chance`. `age`: lets five silent minutes pass for a session, False if it
        was silent before."""
        self.client = client
        self.sessions: list[str] = []
        self.forgotten: list[str] = []
        """Runs that the service does not know."""
        self._urls = urls
        self._age = age
        self._aged: list[bool] = []
        self._chance = chance

    def idle(self) -> list[str]:
        """Lists what was meant and never happened."""
        return ["five minutes passed for no deserted session"] if self._aged and not any(self._aged) else []

    async def work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.desert()

    async def desert(self) -> None:
        """For each second client, five silent minutes pass."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "chaos.deserter", stdin=pipe, stdout=pipe)
        try:
            assert process.stdin and process.stdout
            process.stdin.write(f"{self._chance.choice(self._urls)} {self.client.key}\n".encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEGINS_S):
                    self.sessions.append((await process.stdout.readline()).decode().strip())
                    await asyncio.sleep(SERVES_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if len(self.sessions) % 2:
            self._aged.append(await self._age(self.sessions[-1]))

    async def settle(self) -> None:
        """Ends the sessions."""
        for session in self.sessions:
            await self.client.tinker("POST", f"/sessions/{session}/finish", json={})
            for number, run in enumerate(runs_of(session)):
                known = await self.client.tinker("GET", f"/training_runs/{session}:train:{number}")
                self.forgotten += [run] if known.status_code == 404 else []


def runs_of(session: str) -> list[str]:
    """Names of the runs that a client may have begun, as the service stores them."""
    return [f"run-{session.removeprefix('ses-')}-{number}" for number in range(NUM_RUNS)]
