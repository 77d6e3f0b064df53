"""The jobs of the hostile tenant, again and again: each is refused, or ends as planned. Beside them it plays the acts of acts.py."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.client import Client
from chaos.hostile.acts import ACTS, Foe, runs_of
from chaos.hostile.graders import ESCAPE, code
from chaos.tenants import POLL_S
from common.skills import generate
from harness.live import FINAL, jsonl

FORK = "import os\ndef grade(sample, item):\n    while True: os.fork()\n"
LOOP = "def grade(sample, item):\n    while True: pass\n"
MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
def grade(sample, item):
    return float(any(libc.shmget(0, 2 ** 26, 0o1600) >= 0 for _ in range(64)))
"""
DEEP = "{{item" + ".answer" * 20_000 + "}}"
BRACES, PARENTHESES, ANSI = "{{" * 100_000, "\\(" * 80_000, "\x1b[2J\x1b]0;owned\x07\x1b[31m"
WORDS = "to be or not to be " * 6000
SIZE = {"max_steps": 1, "batch_size": 1, "group_size": 2, "max_tokens": 8}


@dataclass(frozen=True, slots=True)
class Attack:
    """A job, and what must come of it."""

    name: str
    grader: Mapping[str, Any]
    ends: Sequence[str]
    """Its status, or a part of the error: one of these."""
    item: Mapping[str, Any] | None = None


def _math(reference: str) -> dict[str, Any]:
    return {"type": "math", "name": "hostile", "reference": reference}


def _item(answer: str, question: str = "add 1+2") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


ROUGE = {"type": "text_similarity", "name": "hostile", "input": "{{sample.output_text}} {{item.answer}}"}
ATTACKS = (
    Attack("a grader that leaves its session", code(ESCAPE), ["longer than", "groups failed"]),
    Attack("a grader that forks", code(FORK), ["groups failed"]),
    Attack("a grader that loops", code(LOOP), ["groups failed"]),
    Attack("a grader that leaves shared memory", code(MEMORY), ["succeeded", "groups failed"]),
    Attack("a deep template", {**ROUGE, "reference": DEEP, "evaluation_metric": "fuzzy_match"}, ["refused"]),
    Attack("a template of braces", {**ROUGE, "reference": BRACES, "evaluation_metric": "fuzzy_match"}, ["refused"]),
    Attack("an answer of parentheses", _math("{{item.answer}}"), ["the reference is empty"], _item(PARENTHESES)),
    Attack(
        "long texts to rouge",
        {**ROUGE, "reference": "{{item.answer}}", "evaluation_metric": "rouge_l"},
        ["succeeded", "groups failed"],
        _item(WORDS),
    ),
    Attack("control characters", _math("{{item.answer}}"), ["succeeded"], _item(ANSI, f"add 1+2{ANSI}")),
)


@dataclass
class Attempt:
    attack: Attack
    id: str
    outcome: str = ""
    """Its status, with the error if it failed; empty while it runs."""
    forgotten: bool = False

    @property
    def planned(self) -> bool:
        return self.forgotten or any(end in self.outcome for end in self.attack.ends)


class Hostile:
    def __init__(self, client: Client, foe: Foe) -> None:
        self.client = client
        self.foe = foe
        self.attempts: list[Attempt] = []
        self.forgotten: list[str] = []
        """Runs of its deserters that the service does not know."""
        self._files: dict[str, str] = {}
        self._played: set[str] = set()

    def idle(self) -> list[str]:
        """Lists the acts that it meant to do and never did."""
        missing = [act.__name__ for act in ACTS if act.__name__ not in self._played]
        return self.foe.idle() + ([f"hostile: there was no time for {', '.join(missing)}"] if missing else [])

    async def prepare(self) -> None:
        for attack in ATTACKS:
            rows = [attack.item] * 2 if attack.item else generate("add", 1, 2)
            self._files[attack.name] = await self.client.upload("hostile.jsonl", jsonl(rows))

    async def work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._jobs(stop))
            group.create_task(self._act(stop))

    async def settle(self) -> None:
        """Ends its sessions, and follows its jobs to their ends."""
        await self.foe.http.aclose()
        for session in self.foe.sessions:
            await self.client.tinker("POST", f"/sessions/{session}/finish", json={})
            for run in runs_of([session]):
                known = await self.client.tinker("GET", f"/training_runs/{session}:train:{run[-1]}")
                self.forgotten += [run] if known.status_code == 404 else []
        for attempt in self.attempts:
            await self._follow(attempt)

    async def _jobs(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await self._attempt(ATTACKS[number % len(ATTACKS)], number)

    async def _attempt(self, attack: Attack, number: int) -> None:
        method = {"type": "reinforcement", "reinforcement": {"grader": attack.grader, "hyperparameters": SIZE}}
        body = {"model": "tiny", "seed": 7, "training_file": self._files[attack.name], "method": method}
        headers = {"Idempotency-Key": f"{attack.name} {number}"}
        answer = await self.client.call("POST", "/fine_tuning/jobs", json=body, headers=headers)
        refused = answer.status_code != 200
        attempt = Attempt(attack, "" if refused else answer.json()["id"], "refused" if refused else "")
        self.attempts.append(attempt)
        await self._follow(attempt)

    async def _follow(self, attempt: Attempt) -> None:
        while attempt.id:
            job = await self.client.get(f"/fine_tuning/jobs/{attempt.id}")
            attempt.forgotten = job is None
            if job is None or job["status"] in FINAL:
                attempt.outcome = f"{job['status']} {(job['error'] or {}).get('message', '')}" if job else ""
                return
            await asyncio.sleep(POLL_S)

    async def _act(self, stop: asyncio.Event) -> None:
        while True:
            for act in ACTS:
                if stop.is_set():
                    return
                await act(self.foe)
                self._played.add(act.__name__)
