"""Redis' memory is measured by kind of key, and shown where an operator looks."""

from pathlib import Path

from common.bus.bus import Bus
from manager_service.owner.redis_memory import RedisMemory
from tests.support.api_server import running_api

MIB = 1 << 20


async def fill(bus: Bus) -> None:
    cell = bus.cell
    await bus.client.hset(cell.checkpoints("job-a"), mapping={"1": b"x" * (4 * MIB)})
    await bus.client.xadd(cell.dead, {"payload": b"x" * MIB})
    for n in range(3):
        await bus.client.set(cell.key(f"idempotency:{n}"), "x")


async def test_one_owner_measures_and_the_others_and_the_metrics_read_it(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path) as server:
        await fill(server.bus)
        measuring, reading = RedisMemory(server.bus), RedisMemory(server.bus)
        await measuring.look(measures=True)
        await reading.look(measures=False)
        assert reading.largest() == measuring.largest() != ""
        text = (await server.http.get("/metrics", headers=server.as_admin())).text
        name = 'marlaas_redis_bytes{base_model="tiny",kind="dead"} '
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert float(line.removeprefix(name)) == measuring.by_kind["dead"]
