"""Base models, as the API shows them."""

import shutil
from pathlib import Path

import openai
import pytest

from common.settings import TINY
from common.store.bases import push_base
from common.store.objects import Objects
from manager_service.http.openai.adapter_content import with_base
from manager_service.http.stores.tinker_names import tokenizer_id
from tests.support.api_server import create, method, running_api
from tests.support.families import save_family
from tests.support.tinker_client import client_of

CHANGING = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


async def test_a_base_model_says_what_it_is_and_what_its_template_rules_out(redis_url: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text(CHANGING)
    bases = f"tiny,other={tmp_path / 'other'}"
    async with running_api(redis_url, tmp_path / "data", base_models=bases, max_context=1024) as server:
        tiny, other = (await server.http.get("/v1/models")).json()["data"]
        alone = (await server.http.get("/v1/models/tiny")).json()
    assert tiny == alone
    assert tiny["base"] == {
        "source": "tiny",
        "num_weights": 822_656,
        "dtype": "float32",
        "context": 1024,
        "learning_rate": 1e-3,
        "rules_out": [],
        **{"state": "absent", "tier": None, "opens_in_s": 0.0, "waiting_s": 0.0},
    }
    turns, tools = other["base"]["rules_out"]
    assert "tool, user, system" in turns and "tools" in tools
    assert other["base"]["source"] == "other", "no tenant needs to know the operator's folders"


async def test_a_base_model_in_the_store_needs_its_texts_alone(redis_url: str, tmp_path: Path) -> None:
    where = await push_base(Objects.open((tmp_path / "store").as_uri()), "tiny", TINY, lambda _: None)
    async with running_api(redis_url, tmp_path, base_models=f"tiny={where}") as server:
        (base,) = (await server.http.get("/v1/models")).json()["data"]
        folder = Path(tokenizer_id(server.api, server.api.bases["tiny"]))
    assert (base["base"]["source"], base["base"]["num_weights"]) == (where, 822_656)
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    assert with_base(b"{}", where) == b"{}", "the store is no business of its users"


async def test_adapters_on_experts_are_refused_before_a_job_or_run_begins(redis_url: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "moe", ignore=shutil.ignore_patterns("*.safetensors"))
    save_family("qwen3_moe", tmp_path / "moe", vocab_size=320)
    bases = f"tiny,moe={tmp_path / 'moe'}"
    async with running_api(redis_url, tmp_path / "data", base_models=bases) as server:
        for name in ("gate_proj", "gate"):
            complaint = f"no linear layer '{name}'; it has q_proj, k_proj, v_proj, o_proj$"
            with pytest.raises(openai.BadRequestError, match=complaint):
                await create(server.openai, model="moe", method=method(lora_targets=["q_proj", name], max_tokens=32))
        await create(server.openai, model="moe", method=method(lora_targets=["q_proj"], max_tokens=32))
        client = await client_of(server)
        lora = {"rank": 4, "train_attn": False, "train_mlp": True, "train_unembed": True}
        run = {"session_id": await client.session(), "model_seq_id": 0, "base_model": "moe", "lora_config": lora}
        answer = await client.post("create_model", **run)
        assert answer.status_code == 400 and "has none of the layers gate_proj" in answer.text
