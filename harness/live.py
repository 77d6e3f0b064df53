"""A whole cluster of real processes, and its tenants' view of it through the HTTP API."""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.tasks.skills import Split, generate
from common.wire.messages import AdapterRef
from manager_service.launcher.supervisor import LocalCluster

FINAL = {"succeeded", "failed", "cancelled"}
_TEXTS = {"input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
GRADER = {"type": "string_check", "name": "right", "operation": "eq", **_TEXTS}
ALIKE = {"type": "text_similarity", "name": "alike", "evaluation_metric": "fuzzy_match", **_TEXTS}
CALCULATOR = {"name": "calculator", "args": {}}


class Api:
    """One tenant's view of a cluster."""

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url = base_url
        self.key = key
        self.http = httpx.AsyncClient(
            base_url=f"{base_url}/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=240,  # a slow machine answers late, and what is asked again is computed again
            trust_env=False,
            verify=False,  # there is no TLS, and certificates take longer to load than a request
        )
        self.files: dict[tuple[str, Split, int], str] = {}
        """Ids of uploaded items, by skill, split and number."""

    async def get(self, path: str, **params: Any) -> Any:
        """Waits out the moments in which the manager is away."""
        return await self._call("GET", path, params=params)

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return await self._call("POST", path, json=body, headers=headers)

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        for _ in range(200):
            try:
                answer = await self.http.request(method, path, **options)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
                continue
            if answer.status_code < 500:
                assert answer.status_code < 400, f"{method} {path}: {answer.status_code} {answer.text}"
                return answer.json()
            await asyncio.sleep(0.2)
        raise AssertionError(f"{method} {path}: no answer")

    async def tenant(self, name: str, **limits: Any) -> "Api":
        """Makes a tenant, as the admin may; its view."""
        await self.post("/admin/tenants", {"id": name, "name": name, **limits})
        return Api(self.base_url, (await self.post(f"/admin/tenants/{name}/keys", {}))["key"])

    async def upload(self, name: str, content: bytes) -> str:
        """Id of a new file of items."""
        answer = await self.http.post("/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def file(self, skill: str, split: Split, number: int) -> str:
        """Id of an uploaded file of the skill's items."""
        key = (skill, split, number)
        if key not in self.files:
            self.files[key] = await self.upload(f"{skill}.jsonl", jsonl(generate(skill, 1, number, split)))
        return self.files[key]

    async def submit(
        self,
        skill: str,
        *,
        model: str = "tiny",
        seed: int = 7,
        evaluate: bool = False,
        grader: Mapping[str, Any] = GRADER,
        **hyper: Any,
    ) -> str:
        """A job on a skill's items; returns its id."""
        how = {"environment": CALCULATOR} if skill == "calc" else {"grader": grader}
        body: dict[str, Any] = {
            "model": model,
            "seed": seed,
            "suffix": skill,
            "training_file": await self.file(skill, "train", 128),
            "method": {"type": "reinforcement", "reinforcement": {**how, "hyperparameters": hyper}},
        }
        if evaluate:
            body["validation_file"] = await self.file(skill, "held_out", 32)
        job = await self.post("/fine_tuning/jobs", body)
        return job["id"]

    async def until_done(self, *jobs: str, seconds: float = 240, ask_every_s: float = 0.2) -> list[Any]:
        async with asyncio.timeout(seconds):
            while True:
                found = [await self.get(f"/fine_tuning/jobs/{job}") for job in jobs]
                if all(job["status"] in FINAL for job in found):
                    return found
                await asyncio.sleep(ask_every_s)

    async def events(self, job: str) -> list[Any]:
        """Oldest first."""
        page = await self.get(f"/fine_tuning/jobs/{job}/events", limit=100)
        rows = page["data"]
        while page["has_more"]:
            page = await self.get(f"/fine_tuning/jobs/{job}/events", limit=100, after=rows[-1]["id"])
            rows += page["data"]
        return rows[::-1]

    async def steps(self, job: str) -> list[int]:
        """Numbers of the steps that the event log tells of, in its order."""
        return [e["data"]["step"] for e in await self.events(job) if e["type"] == "metrics" and "loss" in e["data"]]

    async def ledger(self, job: str) -> dict[str, int]:
        ledger = await self.get(f"/fine_tuning/jobs/{job}/ledger")
        names = ("issued", "trained", "filtered", "stale", "failed", "cancelled", "in_flight")
        return {name: ledger[name] for name in names}

    async def close(self) -> None:
        await self.http.aclose()


def jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


@asynccontextmanager
async def running(folder: Path | None = None, **options: Any) -> AsyncGenerator[tuple[LocalCluster, Api]]:
    """A cluster as `make up` starts it, and its first tenant's API; in a folder that is deleted afterwards if none is given."""
    with tempfile.TemporaryDirectory() as temporary:
        async with LocalCluster(data_dir=folder or Path(temporary), **options) as cluster:
            api = Api(cluster.base_url, cluster.api_key)
            try:
                yield cluster, api
            finally:
                await api.close()


async def adapter_hashes(cluster: LocalCluster, tenant: str, job: str, version: int) -> dict[str, str]:
    """sha256 of a version's files, as its manifest has them."""
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    manifest = await store.manifest(AdapterRef(tenant, job, version))
    assert manifest is not None, f"{job} has no version {version}"
    return {name: file.sha256 for name, file in manifest.files.items()}


def is_balanced(ledger: dict[str, int]) -> bool:
    """Checks I7."""
    return ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
