"""A base like `tiny` that thinks first, unless its chat template is told not to."""

import shutil
from pathlib import Path

from common.settings import TINY

THINKS = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}()\n{% endif %}"
"""The end of its template: an empty thought. `effort` is another variable."""


def thinking_base(folder: Path) -> Path:
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with (folder / "chat_template.jinja").open("a") as template:
        template.write(THINKS + "{{ effort }}")
    return folder
