"""Jobs of environments that a base model's chat template cannot show: their tools, or the messages with which they answer."""

import os
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from common.settings import TINY
from examples.three_turns import ENVIRONMENT, installed
from tests.support import live_environments
from tests.support.api_server import GRADER, create, running_api

SILENT = (
    "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


LAST_USER_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role != 'user' or loop.revindex < 3 %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def on(environment: Any, **hyper: Any) -> dict[str, Any]:
    return {"type": "reinforcement", "reinforcement": {"environment": environment, "hyperparameters": hyper}}


def base_with(template: str, folder: Path) -> Path:
    """The tiny base with another template."""
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("name", ["calculator", "python"])
async def test_an_environment_with_tools_is_refused_by_name_where_the_template_ignores_tools(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    base = base_with(SILENT, tmp_path / "silent")
    async with running_api(redis_url, tmp_path / "data", base_models=f"tiny={base}") as server:
        with pytest.raises(openai.BadRequestError, match=f"the environment '{name}' has tools, .* 'tiny'") as refused:
            await create(server.openai, method=on({"name": name}))
        assert refused.value.code == "no_tools"
        assert await create(server.openai, method=on({"name": "single_turn", "args": {"grader": GRADER}}))


async def test_a_simulated_user_is_refused_where_the_template_cannot_append_what_users_say(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path / "installed")["PYTHONPATH"].split(os.pathsep)[0])
    bases = f"tiny={TINY},strict={base_with(LAST_USER_ONLY, tmp_path / 'strict')}"
    async with running_api(redis_url, tmp_path / "data", base_models=bases) as server:
        method = on(ENVIRONMENT, max_steps=1)
        assert await create(server.openai, training_file=None, method=method)
        complaint = r"'simulated_user' cannot answer 'strict'.* of role user .* earlier turns"
        with pytest.raises(openai.BadRequestError, match=complaint):
            await create(server.openai, model="strict", training_file=None, method=method)


async def test_an_environment_of_live_sessions_is_refused_in_deterministic_mode(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(live_environments.install(tmp_path / "installed"))
    async with running_api(redis_url, tmp_path / "data", deterministic=True) as server:
        complaint = "'adding' holds its state in a session, .* deterministic mode"
        with pytest.raises(openai.BadRequestError, match=complaint):
            await create(server.openai, method=on({"name": "adding"}, max_steps=1))
