"""The environment that `openenv init` writes, unmodified, under a server of the real package: played as its own client plays it."""

import json
from pathlib import Path

import pytest

from common.environments import OpenEnvArgs
from env_service.environment import Turn
from env_service.environments.openenv import OpenEnv
from env_service.environments.openenv_server import Servers
from env_service.graders.endpoint import Endpoints
from examples.openenv_job import serving
from tests.support.verifiers_python import python_with, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAID = ["hello", "a message of more than ten letters", ""]

OWN_EPISODE = """
import asyncio, json, sys
from openenv import GenericEnvClient
async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as env:
        told = [await env.reset(seed=7)]
        told += [await env.step({"message": text}) for text in sys.argv[2:]]
    print(json.dumps([[one.observation["echoed_message"], one.reward] for one in told]))
asyncio.run(main())
"""


async def test_what_openenv_writes_is_played_as_its_own_client_plays_it(tmp_path: Path) -> None:
    python = python_with("openenv", "0.10.0") / "bin" / "python"
    await run(python, "-m", "openenv.cli", "init", "echo_probe", cwd=tmp_path)
    servers = Servers(Endpoints("127.0.0.1"), "")
    async with serving(str(python), module="server.app", cwd=tmp_path / "echo_probe") as url:
        (shown, _), *own = json.loads(await run(python, "-c", OWN_EPISODE, url, *SAID, cwd=tmp_path))
        session = await OpenEnv(OpenEnvArgs(url=url, observation_field="echoed_message"), servers).open({}, seed=7)
        assert [message["content"] for message in session.messages] == [shown]
        for index, (text, (echo, reward)) in enumerate(zip(SAID, own, strict=True)):
            step = await session.step(Turn(item={}, text=text, index=index, calls=(), tool_timeout_s=5.0))
            assert ([message["content"] for message in step.messages], step.reward) == ([echo], reward)
        await session.close()
    await servers.close()
    assert [reward for _, reward in own] == [0.5, 1.0, 0.0]
