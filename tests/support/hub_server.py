"""A local HTTP server that speaks the hub's protocol, as far as downloads of a model or a dataset need it."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.http_server import Quiet, serving

TOKEN = "hf_good"


class Hub(Quiet):
    """Serves `commits`: for each repository its commits, newest first, each with a folder of files."""

    commits: dict[str, dict[str, Path]]
    gated: set[str]
    served: list[str]
    go_on: threading.Event
    """Weights end only once it is set."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").removeprefix("datasets/").split("/")
        is_api = parts[0] == "api" and parts[1] in ("models", "datasets")
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo not in self.commits:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if repo in self.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        rest = parts[4:] if is_api else parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        commit = next(iter(self.commits[repo])) if revision == "main" else revision
        if commit not in self.commits[repo]:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        folder = self.commits[repo][commit]
        if is_api and len(rest) > 2:  # of a folder within
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if is_api:
            listing = json.dumps(_listing("".join(rest[:1]), repo, commit, folder))
            return self._send(200, listing.encode(), {}, with_body)
        if not (folder / rest[2]).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, with_body)
        content = (folder / rest[2]).read_bytes()
        self.served.append(f"{commit}/{rest[2]}")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        self._send(200, content, headers, with_body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            half = len(content) // 2 if self.path.endswith(".safetensors") else len(content)
            self.wfile.write(content[:half])
            self.wfile.flush()
            if half < len(content):
                self.go_on.wait()
            self.wfile.write(content[half:])


def _listing(what: str, repo: str, commit: str, folder: Path) -> Any:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if what == "tree":
        return [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40} for f in files]
    siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
    return {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}


@contextmanager
def running_hub(commits: dict[str, dict[str, Path]], gated: set[str]) -> Generator[tuple[str, type[Hub]]]:
    """Its URL, for HF_ENDPOINT, and the handler."""
    fields = {"commits": commits, "gated": gated, "served": [], "go_on": threading.Event()}
    handler: type[Hub] = type("OneHub", (Hub,), fields)
    with serving(handler) as url:
        yield url, handler
