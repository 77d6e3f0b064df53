"""`make cluster-test`: the demo's jobs against the docker-compose cluster that `make cluster` started.

    six jobs of three tenants ─► rollout from 1 to 3 ─► SIGKILL to one, and to Redis ─► all succeed, ledgers balance,
    no dead letters

It also looks at the walls: what an env worker can reach and write, and that Redis refused no service anything.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.make_secrets import ENV_FILE, FOLDER, read_settings
from examples.demo import TENANTS
from harness.live import Api, is_balanced

STEPS = 10
READY_S = 180.0
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
except OSError:
    sys.exit(1)
"""
PROXY = """
import http.client, sys
connection = http.client.HTTPConnection("egress", 3128, timeout=5)
connection.set_tunnel(sys.argv[1], 443)
try:
    connection.connect()
except OSError as error:
    print(error)
"""


def say(line: str) -> None:
    print(line, flush=True)


def compose(*arguments: str) -> str:
    """Output of a docker-compose command. Raises CalledProcessError."""
    command = [*os.environ.get("COMPOSE", "docker compose").split(), "--env-file", str(ENV_FILE), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def containers(service: str) -> list[str]:
    return compose("ps", "-q", service).split()


def runs(container: str, *command: str) -> bool:
    return subprocess.run(["docker", "exec", container, *command], capture_output=True).returncode == 0


def python(container: str, code: str, *arguments: str) -> str:
    command = ["docker", "exec", container, "python", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout


async def main() -> None:
    since = time.monotonic()
    url = f"http://{compose('port', 'manager', '8000')}"
    await ready(url)
    say(f"ready at {url}")
    check_walls()
    admin = Api(url, (FOLDER / "keys" / "admin_key").read_text().strip())
    jobs = await create_jobs(url, admin)
    await until_step(jobs, 2)
    await scale_and_kill(admin, jobs)
    restart_redis()
    await check_jobs(jobs)
    check((await admin.get("/cluster/dead"))["data"] == [], "no dead letters")
    check(refusals() == [], "Redis refused no service a command or a key")
    for api in [admin, *dict.fromkeys(api for api, _ in jobs)]:
        await api.close()
    say(f"cluster-test passed after {time.monotonic() - since:.0f} s")


async def ready(url: str) -> None:
    """Raises TimeoutError with what is missing."""
    deadline, answer = time.monotonic() + READY_S, ""
    async with httpx.AsyncClient(trust_env=False) as http:
        while time.monotonic() < deadline:
            try:
                response = await http.get(f"{url}/readyz")
                answer = response.text
                if response.status_code == 200:
                    return
            except httpx.TransportError as error:
                answer = repr(error)
            await asyncio.sleep(0.5)
    raise TimeoutError(f"{url} is not ready: {answer}")


def check(holds: bool, what: str) -> None:
    say(f"  {'ok  ' if holds else 'FAIL'} {what}")
    if not holds:
        sys.exit(f"cluster-test failed: {what}")


# ---- walls ----------------------------------------------------------------------------------------------------------


def check_walls() -> None:
    env, manager = containers("env")[0], containers("manager")[0]
    for name, port in (("redis", "6379"), ("store", "9000"), ("egress", "3128")):
        check(runs(env, "python", "-c", REACH, name, port), f"an env worker reaches {name}:{port}")
    rollout = containers("rollout")[0]
    for name, port in ((address(manager), "8000"), (address(rollout), "1"), ("1.1.1.1", "443"), ("8.8.8.8", "53")):
        check(not runs(env, "python", "-c", REACH, name, port), f"an env worker does not reach {name}:{port}")
    check("403" in python(env, PROXY, "example.com"), "the proxy refuses a host that is not in the list")
    check(not runs(env, "sh", "-c", "touch /app/x"), "an env worker's files are read-only")
    check(runs(env, "sh", "-c", "test $(id -u) = 10001"), "an env worker is not root")
    for container in (env, manager):
        check(not runs(container, "python", "-c", "import torch"), f"no torch in {image(container)}")


def inspect(container: str) -> dict[str, Any]:
    return json.loads(subprocess.run(["docker", "inspect", container], check=True, capture_output=True).stdout)[0]


def image(container: str) -> str:
    return str(inspect(container)["Config"]["Image"])


def address(container: str) -> str:
    """The container's address in any of its networks."""
    return str(next(iter(inspect(container)["NetworkSettings"]["Networks"].values()))["IPAddress"])


def refusals() -> list[str]:
    """Redis' log of refused commands; a client library asks for some that it does not need."""
    password = read_settings(ENV_FILE.read_text())["REDIS_OPERATOR_PASSWORD"]
    command = ["docker", "exec", "-e", "REDISCLI_AUTH", containers("redis")[0], "redis-cli", "--user", "operator"]
    done = subprocess.run(
        [*command, "ACL", "LOG"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "REDISCLI_AUTH": password},
    )
    lines = done.stdout.splitlines()
    return [after for before, after in itertools.pairwise(lines) if before == "object" and "client|" not in after]


# ---- jobs -----------------------------------------------------------------------------------------------------------


async def create_jobs(url: str, admin: Api) -> list[tuple[Api, str]]:
    jobs: list[tuple[Api, str]] = []
    for tenant, skills in TENANTS.items():
        known = (await admin.get("/admin/tenants"))["data"]
        if tenant not in [record["id"] for record in known]:
            await admin.post("/admin/tenants", {"id": tenant})
        api = Api(url, (await admin.post(f"/admin/tenants/{tenant}/keys", {}))["key"])
        for skill in skills:
            jobs.append((api, await api.submit(skill, evaluate=True, max_steps=STEPS, batch_size=8)))
            say(f"  {tenant}: {skill} is {jobs[-1][1]}")
    return jobs


async def until_step(jobs: list[tuple[Api, str]], step: int) -> None:
    async with asyncio.timeout(READY_S):
        while min([len(await api.steps(job)) for api, job in jobs]) < step:
            await asyncio.sleep(0.5)
    say(f"all jobs have made {step} steps")


async def scale_and_kill(admin: Api, jobs: list[tuple[Api, str]]) -> None:
    victim = containers("rollout")[0]
    compose("up", "-d", "--no-deps", "--no-recreate", "--scale", "rollout=3", "rollout")
    async with asyncio.timeout(READY_S):
        while await num_rollouts(admin) < 3:
            await asyncio.sleep(0.5)
    say("rollout has three workers")
    subprocess.run(["docker", "kill", "--signal", "KILL", victim], check=True, stdout=subprocess.DEVNULL)
    done = [job for api, job in jobs if len(await api.steps(job)) == STEPS]
    say(f"the first of them was killed; {len(jobs) - len(done)} of {len(jobs)} jobs were under way")


def restart_redis() -> None:
    """It comes back with all that it has acknowledged."""
    container = containers("redis")[0]
    for command in (["kill", "--signal", "KILL"], ["start"]):
        subprocess.run(["docker", *command, container], check=True, stdout=subprocess.DEVNULL)
    say("Redis was killed and started")


async def num_rollouts(admin: Api) -> int:
    workers = (await admin.get("/cluster/workers"))["data"]
    return sum(worker["service"] == "rollout" for worker in workers)


async def check_jobs(jobs: list[tuple[Api, str]]) -> None:
    for api, job in jobs:
        (record,) = await api.until_done(job, seconds=600)
        check(record["status"] == "succeeded", f"{job} {record['status']} {record.get('error') or ''}")
        ledger = await api.ledger(job)
        check(is_balanced(ledger) and ledger["in_flight"] == 0, f"its ledger balances: {ledger}")
        check(await api.steps(job) == list(range(1, STEPS + 1)), f"it made its {STEPS} steps once each")


if __name__ == "__main__":
    if not Path(ENV_FILE).exists():
        sys.exit("error: there is no .env.cluster; run `make cluster` first")
    asyncio.run(main())
