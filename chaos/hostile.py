"""What the hostile tenant does, again and again: each attack is refused, or is a job that ends as planned."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from chaos.client import Client
from chaos.tenants import POLL_S
from common.skills import generate
from harness.live import FINAL, jsonl

ESCAPE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for attempt in (lambda: libc.prctl(1, 0, 0, 0, 0), os.setsid, lambda: os.setpgid(0, 0)):
    try: attempt()
    except OSError: pass
def grade(sample, item):
    while True: time.sleep(1)
"""
FORK = "import os\ndef grade(sample, item):\n    while True: os.fork()\n"
LOOP = "def grade(sample, item):\n    while True: pass\n"
BRACES, PARENTHESES, ANSI = "{{" * 100_000, "\\(" * 80_000, "\x1b[2J\x1b]0;owned\x07\x1b[31m"
WORDS = "to be or not to be " * 6000
HALF_OPEN = (b"", b"GET /v1/mo", b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\nab")
NUM_HALF_OPEN = 30
SIZE = {"max_steps": 1, "batch_size": 1, "group_size": 2, "max_tokens": 8}


@dataclass(frozen=True, slots=True)
class Attack:
    """A job, and what must come of it."""

    name: str
    grader: Mapping[str, Any]
    ends: Sequence[str]
    """Its status, or a part of the error: one of these."""
    item: Mapping[str, Any] | None = None


def _code(source: str) -> dict[str, Any]:
    return {"type": "python", "name": "hostile", "source": source}


def _math(reference: str) -> dict[str, Any]:
    return {"type": "math", "name": "hostile", "reference": reference}


def _item(answer: str, question: str = "add 1+2") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


ROUGE = {"type": "text_similarity", "name": "hostile", "input": "{{sample.output_text}} {{item.answer}}"}
ATTACKS = (
    Attack("a grader that leaves its session", _code(ESCAPE), ["longer than", "groups failed"]),
    Attack("a grader that forks", _code(FORK), ["groups failed"]),
    Attack("a grader that loops", _code(LOOP), ["groups failed"]),
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
    def __init__(self, client: Client, urls: list[str]) -> None:
        self.client = client
        self.attempts: list[Attempt] = []
        self._ports = [urlsplit(url).port for url in urls]
        self._files: dict[str, str] = {}

    async def prepare(self) -> None:
        for attack in ATTACKS:
            rows = [attack.item] * 2 if attack.item else generate("add", 1, 2)
            self._files[attack.name] = await self.client.upload("hostile.jsonl", jsonl(rows))

    async def work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._jobs(stop))
            group.create_task(self._requests(stop))

    async def settle(self) -> None:
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

    async def _requests(self, stop: asyncio.Event) -> None:
        """Giant bodies, and connections that are left half open."""
        while not stop.is_set():
            body = json.dumps({"model": "tiny", "prompt": "x" * 5_000_000}).encode()
            await self.client.call("POST", "/completions", content=body, headers={"Content-Type": "application/json"})
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for number in range(NUM_HALF_OPEN):
                    address = ("127.0.0.1", self._ports[number % 2])
                    connection = stack.enter_context(socket.create_connection(address, timeout=1))
                    connection.send(HALF_OPEN[number % len(HALF_OPEN)])
                await asyncio.sleep(5)
