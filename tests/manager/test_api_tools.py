"""Jobs of environments with tools, on a base model whose chat template leaves tools out."""

import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from common.settings import TINY
from tests.support.api_server import running_api, upload

SILENT = (
    "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def base_without_tools(folder: Path) -> Path:
    """The tiny base with another template."""
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(SILENT)
    return folder


@pytest.mark.parametrize("name", ["calculator", "python"])
async def test_an_environment_with_tools_is_refused_by_name_where_the_template_ignores_tools(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    base = base_without_tools(tmp_path / "silent")
    async with running_api(redis_url, tmp_path / "data", base_models=f"tiny={base}") as server:
        file = await upload(server.openai)

        async def create(environment: str, **args: Any) -> None:
            given = {"environment": {"name": environment, "args": args}}
            method: Any = {"type": "reinforcement", "reinforcement": given}
            await server.openai.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body={"method": method})

        with pytest.raises(openai.BadRequestError, match=f"the environment '{name}' has tools, .* 'tiny'") as refused:
            await create(name)
        assert refused.value.code == "no_tools"
        exact = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
        await create("single_turn", grader=exact | {"operation": "eq"})
