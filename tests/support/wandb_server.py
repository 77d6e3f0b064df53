"""A stand-in for a W&B server: as much of its protocol as one run needs. History lines lie where their offset says."""

import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Quiet, serving

PROJECT: dict[str, Any] = {"id": "p", "name": "mine", "entity": {"id": "e", "name": "team"}}


@dataclass
class WandbServer:
    url: str = ""
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    exit_codes: list[int] = field(default_factory=list[int])  # of streams that ended the run
    num_opened: int = 0  # runs, how often
    refuses_rows: bool = False
    keys: set[str] = field(default_factory=set[str])  # that came with requests

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if "file_stream" in path:
            return self._take(body)
        asked, variables = body.get("operationName"), body.get("variables") or {}
        self.num_opened += asked == "UpsertBucket"
        run = {"id": "cnVu", "project": PROJECT, "name": variables.get("name"), "displayName": ""}
        run["historyLineCount"] = len(self.history)
        files = {"runID": "cnVu", "uploadHeaders": [], "files": self._files(variables)}
        answers: dict[Any, Any] = {
            "UpsertBucket": {"upsertBucket": {"bucket": run, "inserted": not self.history}},
            "RunResumeStatus": {"model": {**PROJECT, "bucket": self._status(run)}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "CreateRunFiles": {"createRunFiles": files},
        }
        return {"data": answers.get(asked, {})}

    def _files(self, variables: dict[str, Any]) -> list[dict[str, str]]:
        return [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables.get("files", [])]

    def _status(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The run as a client that resumes asks for it."""
        if not self.history:
            return None
        tail = json.dumps([json.dumps(self.history[-1])])
        counts = {"logLineCount": 0, "eventsLineCount": 0, "historyTail": tail, "eventsTail": "[]"}
        return {**run, **counts, "summaryMetrics": "{}", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}'}

    def _take(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuses_rows:
            return {}
        lines = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        end = lines["offset"] + len(lines["content"])
        self.history[lines["offset"] : end] = [json.loads(line) for line in lines["content"]]
        if body.get("complete"):
            self.exit_codes.append(body["exitcode"])
        return {}


@contextmanager
def wandb_server() -> Generator[WandbServer]:
    server = WandbServer()

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.content()
            content = gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content
            server.keys.add(self.headers.get("Authorization", ""))
            answer = {} if self.path.endswith("/upload") else server.answer(self.path, json.loads(content))
            status = 403 if server.refuses_rows and "file_stream" in self.path else 200
            self.answer(json.dumps(answer).encode(), status=status)

        do_PUT = do_POST

    with serving(Handler) as server.url:
        yield server
