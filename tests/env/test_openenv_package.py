"""The environment that `openenv init` writes, unmodified, under a server of the real package: played as its own client plays it."""

import asyncio
import json
from pathlib import Path

import pytest

from common.tasks.environments import OpenEnvArgs
from env_service.environment import Turn
from env_service.environments.openenv import OpenEnv
from env_service.environments.openenv_server import Servers
from env_service.graders.endpoint import Endpoints
from examples.openenv_job import serving
from tests.support.verifiers_python import python_with, with_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAID = ["hello", "a message of more than ten letters", ""]

ALL_IN_ONE = """
import asyncio, json, os, pathlib, runpy, sys, time, urllib.request
from unittest.mock import MagicMock
sys.modules["gradio"] = MagicMock()
told_in, said, (_, server, *options) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
sys.argv = ["openenv", "init", "echo_probe"]
try:
    runpy.run_module("openenv.cli", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
from openenv import GenericEnvClient
async def play(url):
    async with GenericEnvClient(base_url=url) as env:
        told = [await env.reset(seed=7)]
        told += [await env.step({"message": text}) for text in said]
    told_in.with_suffix(".part").write_text(json.dumps([[one.observation["echoed_message"], one.reward] for one in told]))
    told_in.with_suffix(".part").rename(told_in)
def play_once_it_answers(url):
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/schema").close()
            return asyncio.run(play(url))
        except OSError:
            time.sleep(0.1)
if os.fork() == 0:
    try:
        play_once_it_answers(f"http://127.0.0.1:{options[-1]}")
    finally:
        os._exit(0)
os.chdir("echo_probe")
sys.path.insert(0, os.getcwd())
sys.argv = [server, *options]
runpy.run_module(server, run_name="__main__", alter_sys=True)
"""
"""`openenv init`, then the server that it wrote, and beside it the package's own client: to import the package takes
five seconds, two of which are for gradio, by which it shows pages that nobody asks for."""


async def test_what_openenv_writes_is_played_as_its_own_client_plays_it(tmp_path: Path) -> None:
    (tmp_path / "all_in_one.py").write_text(ALL_IN_ONE)
    told = tmp_path / "own.json"
    first = [str(tmp_path / "all_in_one.py"), str(told), json.dumps(SAID)]
    python = with_packages(tmp_path, python_with("openenv", "0.10.0"), tmp_path, *first)
    servers = Servers(Endpoints("127.0.0.1"), "")
    async with serving(str(python), module="server.app", cwd=tmp_path) as url:
        while not told.exists():
            await asyncio.sleep(0.1)
        (shown, _), *own = json.loads(told.read_text())
        session = await OpenEnv(OpenEnvArgs(url=url, observation_field="echoed_message"), servers).open({}, seed=7)
        assert [message["content"] for message in session.messages] == [shown]
        for index, (text, (echo, reward)) in enumerate(zip(SAID, own, strict=True)):
            step = await session.step(Turn(item={}, text=text, index=index, calls=(), tool_timeout_s=30.0))
            assert ([message["content"] for message in step.messages], step.reward) == ([echo], reward)
        await session.close()
    await servers.close()
    assert [reward for _, reward in own] == [0.5, 1.0, 0.0]
