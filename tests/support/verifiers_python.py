"""Real versions of `verifiers`, each in a Python environment of its own, and a model by a script for what runs in them."""

import contextlib
import json
import shlex
import subprocess
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from tests.support.http_server import Quiet, serving
from tests.support.installed import PACKAGES, THIS, lent, made

Said = Callable[[list[dict[str, Any]]], str]
"""The answer of a model to a conversation."""


def verifiers_python(version: str, *more: str) -> Path:
    """An environment with this version, which is made when it is first needed. Raises RuntimeError if it cannot be made."""
    return python_with("verifiers", version, *more)


def without_torch(python: Path) -> Path:
    """The same environment, where torch is not found: `verifiers.v1` needs transformers, which needs four seconds to import torch."""
    (python / PACKAGES / "no_torch.pth").write_text("import sys; sys.modules['torch'] = None\n")
    return python


def python_with(package: str, version: str, *more: str) -> Path:
    """An environment with this version of a package, as `verifiers_python` makes it."""
    try:
        name = "-".join([package, version, *more, lent()])
        return made(name, [f"{package}=={version}", *more], lender=THIS)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{package} {version} cannot be installed here: {error}") from error


def with_packages(folder: Path, python: Path, packages: Path, *first: str) -> Path:
    """An interpreter that also finds the packages in a folder, and the programs beside it. `first`: words that stand before those
    it is given, such as a program that runs them itself."""
    wrapper = folder / f"python-{packages.name}"
    program = shlex.join([f"{python}/bin/python", *first])
    wrapper.write_text(f'#!/bin/sh\nPATH={python}/bin:$PATH PYTHONPATH={packages} exec {program} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@contextlib.contextmanager
def model_by_script(said: Said) -> Generator[str]:
    """The URL of a model with OpenAI's chat completions, which says what the script does."""

    class Handler(Quiet):
        def do_POST(self) -> None:
            asked = json.loads(self.content())
            message = {"role": "assistant", "content": said(asked["messages"])}
            choice = {"index": 0, "delta" if asked.get("stream") else "message": message, "finish_reason": "stop"}
            about = {"id": "chatcmpl-0", "created": 0, "model": asked["model"], "choices": [choice]}
            if asked.get("stream"):
                chunk = json.dumps({**about, "object": "chat.completion.chunk"})
                self.answer(f"data: {chunk}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
            else:
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                self.answer(json.dumps({**about, "object": "chat.completion", "usage": usage}).encode())

    with serving(Handler) as url:
        yield f"{url}/v1"


def plain(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
