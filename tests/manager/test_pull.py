"""A pulled adapter and PEFT, and what can be pulled from the real API."""

import asyncio
import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.settings import TINY
from common.store.adapters import PEFT_FILES
from manager_service.launcher.commands.main import app
from manager_service.records.run_records import run_of
from marlaas_client.adapters import CONFIG, name_base, unpack
from tests.support.api_server import ApiServer, running_api
from tests.support.rollout_cases import files_of
from tests.support.run_world import owned_runs
from tests.support.tinker_client import client_of


def test_a_pulled_adapter_loads_without_a_word_about_its_base_model(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM  # imported here: it takes seconds

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files_of(5, rank=6, alpha=24.0).items():
            archive.writestr(name, content)
    unpack(buffer.getvalue(), tmp_path)
    name_base(tmp_path / CONFIG, {"tiny": str(TINY)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path))
    assert model.peft_config["default"].base_model_name_or_path == str(TINY)
    assert model.get_base_model().config.hidden_size == 128


async def pull(server: ApiServer, *words: str) -> Any:
    """The JSON that `marlaas pull` prints; its error, if there is one."""
    words = ("pull", *words, "--url", server.url, "--json")
    ended = await asyncio.to_thread(CliRunner().invoke, app, words, env={"MARLAAS_API_KEY": server.key})
    (told,) = [line for line in ended.stdout.splitlines() if line.startswith("{")] or [
        "null"
    ]  # this process logs there too
    return json.loads(told) if ended.exit_code == 0 else str(ended.exception)


async def test_what_a_run_saved_is_pulled_by_its_path_and_by_its_models_name(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running_api(redis_url, tmp_path / "data") as server, owned_runs(server):
        client = await client_of(server)
        run = await client.run(await client.session())
        for seq, name, body in (
            (1, "optim_step", {"adam_params": {}}),
            (2, "save_weights", {"path": "mine"}),
            (3, "optim_step", {"adam_params": {}}),
        ):
            assert "error" not in await client.done(name, model_id=run, seq_id=seq, **body)
        path, model = f"tinker://{run}/weights/mine", f"ft:tiny:default::{run_of(run)}"
        for words, version in (([path], 1), ([model], 2), ([f"{model}@1"], 1), ([model, "--version", "1"], 1)):
            pulled = await pull(server, *words)
            assert pulled["version"] == version
            files = await server.api.objects.paths(f"adapters/default/{run_of(run)}/{version:08d}")
            assert files, pulled
            for name in PEFT_FILES:
                content = Path(pulled["folder"], name).read_bytes()
                stored = [await server.api.objects.get(file) for file in files if file.endswith(name)]
                assert content in stored
        assert "leave it out" in await pull(server, path, "--version", "1")
        assert "nothing was saved" in await pull(server, f"tinker://{run}/weights/other")
        other = await client_of(server, "acme")
        foreign = await server.http.get(
            "/v1/adapters/content", params={"model": path}, headers={"Authorization": f"Bearer {other.key}"}
        )
        assert foreign.status_code == 404
        assert (await server.http.get("/v1/adapters/content", params={"model": "tiny"})).status_code == 400
