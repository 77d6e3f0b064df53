"""A tenant's unfinished jobs are bounded, in number and in bytes: it cannot fill Redis with queued work."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.support.api_server import GRADER, ApiServer, method, running_api, running_jobs, upload


async def create(server: ApiServer, file: str, *, comment: str = "", key: str = "") -> httpx.Response:
    """`comment`: makes the method longer."""
    given = method()
    given["reinforcement"]["grader"] = GRADER | {"name": comment}
    headers = {"Idempotency-Key": key} if key else {}
    body = {"model": "tiny", "training_file": file, "method": given}
    return await server.http.post("/v1/fine_tuning/jobs", json=body, headers=headers)


async def test_one_job_more_than_a_tenant_may_have_is_refused_even_in_a_race(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_unfinished_jobs=3) as server:
        file = await upload(server.openai)
        answers = await asyncio.gather(*(create(server, file, key=str(i)) for i in range(8)))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 5}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "too_many_jobs"
        assert "3 unfinished jobs and runs" in refused.json()["error"]["message"]
        again = [await create(server, file, key=str(i)) for i in range(8)]
        assert [answer.status_code for answer in again] == [answer.status_code for answer in answers]
        other = await server.new_tenant("acme")
        others: Any = method()
        assert await other.fine_tuning.jobs.create(model="tiny", training_file=await upload(other), method=others)


async def test_jobs_whose_records_have_too_many_bytes_are_refused(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_unfinished_bytes=1_000_000) as server:
        file = await upload(server.openai)
        answers = [await create(server, file, comment="x" * 150_000) for _ in range(4)]
        # the record has the grader twice: in its method, and in its environment
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[-1].json()["error"]["code"] == "too_many_jobs"
        assert (await create(server, file)).status_code == 200


async def test_a_job_that_ends_makes_room_for_another(redis_url: str, tmp_path: Path) -> None:
    async with (
        running_api(redis_url, tmp_path / "data", max_unfinished_jobs=1) as server,
        running_jobs(server),
    ):
        file = await upload(server.openai)
        first = (await create(server, file)).json()["id"]
        assert (await create(server, file)).status_code == 429
        await server.openai.fine_tuning.jobs.cancel(first)
        async with asyncio.timeout(60):
            while (answer := await create(server, file)).status_code == 429:
                await asyncio.sleep(0.05)
        assert answer.status_code == 200
