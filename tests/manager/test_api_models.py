"""Base models, as the API shows them."""

import shutil
from pathlib import Path

from common.settings import TINY
from tests.support.api_server import running_api

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
    }
    turns, tools = other["base"]["rules_out"]
    assert "tool, user, system" in turns and "tools" in tools
    assert other["base"]["source"] == "other", "no tenant needs to know the operator's folders"
