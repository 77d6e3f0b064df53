"""The clients of chaos that are killed: a sound service knows each run that they begin, and answers others."""

import random
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from chaos import tenants
from chaos.tenants import Client, Deserted, runs_of
from tests.support.api_server import ApiServer, running_api


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


async def test_all_runs_of_clients_that_were_killed_are_known(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged = list[str]()

    async def age(session: str) -> bool:
        aged.append(session)
        return False

    monkeypatch.setattr(tenants, "BEGINS_S", 60.0)
    tenant = Deserted(Client([server.url], server.key), [server.url], age, random.Random(1))
    assert tenant.idle() == []
    for _ in range(2):
        await tenant.desert()
    await tenant.settle()
    # Then five minutes were to pass for each second client, which is told if they did not
    assert aged == tenant.sessions[:1] and len(tenant.sessions) == 2
    assert tenant.idle() == ["five minutes passed for no deserted session"]
    # And the names of all runs that the service knows are those that chaos looks for
    names = {name.decode() async for name in server.bus.client.scan_iter(server.bus.cell.run("*"))}
    assert names and names <= {server.bus.cell.run(run) for session in tenant.sessions for run in runs_of(session)}
    assert (await server.http.get("/v1/models")).status_code == 200
    await tenant.client.close()
