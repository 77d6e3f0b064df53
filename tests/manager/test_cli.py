"""The command line against a small HTTP server that answers like the API."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest
from typer.testing import CliRunner

from common.errors import MarlaasError
from common.settings import TINY
from manager_service.launcher.commands.main import app
from marlaas_client.adapters import unpack
from marlaas_client.cli import account, output
from marlaas_client.cli.progress import JobProgress
from marlaas_client.cli.submit import parse_environment, parse_grader, parse_hyper
from marlaas_client.cli.view import live_view
from marlaas_client.client import Client, error_message
from marlaas_client.cluster_file import CLUSTER_FILE, ClusterFile
from marlaas_client.errors import ClientError, InvalidInput, JobFailed, Refused
from marlaas_client.place import ClientSettings

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-test"
JOB = {
    "id": "ftjob-1",
    "object": "fine_tuning.job",
    "created_at": 1_700_000_000,
    "finished_at": 1_700_000_060,
    "model": "tiny",
    "fine_tuned_model": "ft:tiny:acme:sums:ftjob-1",
    "organization_id": "acme",
    "user_provided_suffix": "sums",
    "status": "succeeded",
    "num_steps": 2,
    "error": None,
}

ESTIMATED = ("POST", "/v1/fine_tuning/jobs/estimate")
ESTIMATE = {
    "num_steps": 15,
    "num_trajectories": 1920,
    "tokens": 35_000,
    "max_tokens": 250_000,
    "seconds": 121.0,
    "steps_within_limit": 7,
}


def metrics(number: int, **data: Any) -> dict[str, Any]:
    event = {"id": str(number), "created_at": 1_700_000_000 + number, "level": "info", "type": "metrics"}
    return {**event, "message": f"event {number}", "data": data}


EVENTS = [
    metrics(1, version=0, eval_reward_mean=0.5),
    metrics(2, step=1, version=1, reward_mean=0.6, step_tokens=300),
    metrics(3, step=2, version=2, reward_mean=0.9, step_tokens=300),
    metrics(4, version=2, eval_reward_mean=0.97),
]


class FakeApi(BaseHTTPRequestHandler):
    """Answers by (method, path); remembers the bodies that it was sent."""

    answers: dict[tuple[str, str], Any]
    requests: list[tuple[str, Any]]
    query: ClassVar[dict[str, str]] = {}
    """The query of the last request."""
    drop_after: int | None = None
    """The first stream of events breaks after so many."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        path = urlsplit(self.path).path
        FakeApi.query = dict(parse_qsl(urlsplit(self.path).query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((path, body))
        answer: Any = self.answers.get((method, path), (404, {"error": {"message": f"no such thing: {path}"}}))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            answer = (401, {"error": {"message": "this API key is not known"}})
        if path.endswith("/events") and "stream" in self.path:
            return self._stream()
        status, content = cast("tuple[int, Any]", answer if isinstance(answer, tuple) else (200, answer))
        if isinstance(content, list):
            content = self._page(cast("list[dict[str, Any]]", content))
        self._send(status, content if isinstance(content, bytes) else json.dumps(content).encode())

    def _page(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Two a page."""
        after = parse_qs(urlsplit(self.path).query).get("after", [""])[0]
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        return {"object": "list", "data": items[start : start + 2], "has_more": start + 2 < len(items)}

    def _stream(self) -> None:
        first = int(self.headers.get("Last-Event-ID") or 0)
        events = EVENTS[first:]
        if self.drop_after is not None and not first:
            events = events[: self.drop_after]
        lines = [f"id: {event['id']}\ndata: {json.dumps(event)}\n\n" for event in events]
        self._send(200, "".join([": hello\n\n", *lines]).encode(), "text/event-stream")

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeApi]]:
    """A running server; the CLI finds it, and its key, in the environment."""
    handler = type("Handler", (FakeApi,), {"answers": {}, "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("MARLAAS_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MARLAAS_API_KEY", KEY)
        monkeypatch.setenv("MARLAAS_DATA_DIR", str(tmp_path))
        yield handler
        server.shutdown()
        thread.join()


def marlaas(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    command = [sys.executable, "-m", "manager_service.launcher.commands.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": ""}, cwd=ROOT)


def run(*arguments: str) -> str:
    """Standard output. Raises what the command raised."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_submit_uploads_the_files_and_creates_the_job(api: type[FakeApi], tmp_path: Path) -> None:
    # Given two files
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held-out.jsonl"
    train.write_text('{"messages": [], "answer": "1"}\n')
    held_out.write_text('{"messages": [], "answer": "2"}\n')
    api.answers = {("POST", "/v1/files"): {"id": "file-1"}, ("POST", "/v1/fine_tuning/jobs"): JOB}
    # When they are submitted
    options = ["--grader", "string_check:answer", "--hyper", "max_steps=40", "--hyper", "loss=dapo", "--suffix", "sums"]
    printed = run("submit", str(train), "--validation", str(held_out), *options, "--json")
    # Then the API was asked for just that
    assert json.loads(printed) == JOB
    assert [path for path, _ in api.requests] == ["/v1/files", "/v1/files", "/v1/fine_tuning/jobs"]
    assert train.read_bytes() in api.requests[0][1]
    request = json.loads(api.requests[2][1])
    assert request["training_file"] == request["validation_file"] == "file-1"
    assert request["suffix"] == "sums"
    reinforcement = request["method"]["reinforcement"]
    assert reinforcement["hyperparameters"] == {"max_steps": 40, "loss": "dapo"}
    assert reinforcement["grader"]["reference"] == "{{item.answer}}"


def test_a_supervised_job_needs_no_grader(api: type[FakeApi], tmp_path: Path) -> None:
    (train := tmp_path / "train.jsonl").write_text('{"prompt": "min 2,1", "completion": "1"}\n')
    api.answers = {("POST", "/v1/files"): {"id": "file-1"}, ("POST", "/v1/fine_tuning/jobs"): JOB, ESTIMATED: ESTIMATE}
    run("submit", str(train), "--method", "supervised", "--hyper", "n_epochs=2")
    request = json.loads(api.requests[-1][1])
    assert request["method"] == {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    run("submit", str(train), "--method", "supervised")
    assert json.loads(api.requests[-1][1])["method"] == {"type": "supervised", "supervised": {}}
    # from another job's model
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    run("submit", str(train), "--method", "supervised", "--model", "ftjob-1@5")
    assert json.loads(api.requests[-1][1])["model"] == f"{JOB['fine_tuned_model']}@5"
    with pytest.raises(InvalidInput, match="leave out --grader"):
        run("submit", str(train), "--method", "supervised", "--grader", "math:answer")
    with pytest.raises(InvalidInput, match="--method supervised"):
        run("submit", str(train))


def test_what_a_job_would_need_is_said_before_it_is_created(api: type[FakeApi]) -> None:
    api.answers = {("POST", "/v1/fine_tuning/jobs"): JOB, ESTIMATED: ESTIMATE}
    words = ("submit", "--environment", "calculator", "--hyper", "max_steps=15")
    shown = CliRunner().invoke(app, words).output
    assert (
        "15 steps; 1,920 trajectories; about 35,000 tokens, at most 250,000; at least 2 min, if nothing else runs"
        in shown
    )
    assert "max_tokens_total ends it after about 7 steps" in shown and shown.endswith("marlaas watch ftjob-1\n")
    assert [path for path, _ in api.requests] == [ESTIMATED[1], "/v1/fine_tuning/jobs"]
    assert api.requests[0][1] == api.requests[1][1]
    assert json.loads(run(*words, "--estimate", "--json")) == ESTIMATE
    assert api.requests[-1][0] == ESTIMATED[1], "no job is created"


@pytest.mark.parametrize(("estimate", "status"), [(True, 200), (True, 400), (False, 400)])
def test_neither_an_estimate_nor_a_refused_job_leaves_files_behind(
    api: type[FakeApi], tmp_path: Path, estimate: bool, status: int
) -> None:
    (items := tmp_path / "items.jsonl").write_text('{"messages": [], "answer": "1"}\n')
    path = ESTIMATED[1] if estimate else "/v1/fine_tuning/jobs"
    api.answers = {
        ("POST", "/v1/files"): {"id": "file-1"},
        ("DELETE", "/v1/files/file-1"): {"deleted": True},
        ("POST", path): (status, ESTIMATE if status == 200 else {"error": {"message": "no such field"}}),
    }
    with nullcontext() if status == 200 else pytest.raises(Refused, match="no such field"):
        words = ("submit", str(items), "--validation", str(items), "--grader", "math:answer")
        run(*words, "--estimate" if estimate else "--json")
    asked = [path for path, _ in api.requests]
    assert asked == ["/v1/files", "/v1/files", path, "/v1/files/file-1", "/v1/files/file-1"]


def test_what_is_seen_here_is_said_before_anything_is_uploaded(api: type[FakeApi], tmp_path: Path) -> None:
    (items := tmp_path / "items.jsonl").write_text('{"messages": [], "answer": "1"}\n')
    for wrong, complaint in (
        (["--log", "mlflow:sums"], "mlflow:sums: write wandb:PROJECT or trackio:PROJECT"),
        (["--adapter", str(tmp_path)], "there is no adapter_config.json"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            run("submit", str(items), "--grader", "math:answer", *wrong)
    assert not api.requests


def test_a_password_in_the_url_is_refused_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://me:secret@host:8000/v1", "me:secret@host", "http://me:secret@host:99999", "ftp://secret@host"):
        monkeypatch.setenv("MARLAAS_URL", url)
        with pytest.raises(InvalidInput, match=r"…@host.* holds a name or a password") as refused:
            run("jobs")
        assert "secret" not in str(refused.value)


def test_environments_are_listed_with_their_arguments(api: type[FakeApi]) -> None:
    properties = {"folder": {}, "depth": {"default": 3}, "seed": {"default": None}}
    args = {"properties": properties, "required": ["folder"], "additionalProperties": True}
    own = {"id": "maze", "package": "mazes 1.2", "makes_items": True, "args": args, "error": None}
    broken = {"id": "broken", "package": "broken 1.0", "makes_items": False, "args": None, "error": "cannot be loaded"}
    api.answers["GET", "/v1/environments"] = {"data": [own, broken]}
    rows = [" ".join(line.split()) for line in run("env", "list").splitlines()]
    assert "maze mazes 1.2 its own folder, [depth=3], [seed], …" in rows
    assert "broken broken 1.0 of a file cannot be loaded" in rows


def test_a_check_takes_a_short_grader_and_warns_of_an_old_version(api: type[FakeApi]) -> None:
    old = "1.3 is installed, and 1.2 in use until managers and env workers start again"
    known = [
        {"id": "python", "makes_items": False, "error": None},
        {"id": "maze", "makes_items": True, "error": old},
    ]
    api.answers["GET", "/v1/environments"] = {"data": known}
    api.answers["POST", "/v1/fine_tuning/jobs"] = (400, {"error": {"message": "it needs a training_file"}})
    with pytest.raises(Refused, match="it needs a training_file"):
        run("env", "check", "python", "--args", '{"grader": "string_check:answer"}')
    asked = json.loads(api.requests[-1][1])
    environment = {"name": "python", "args": {"grader": parse_grader("string_check:answer")}}
    assert asked["method"]["reinforcement"]["environment"] == environment and asked["webhooks"] is False
    outdated = CliRunner().invoke(app, ["env", "check", "maze", "--args", '{"grader": "mine"}'])
    assert isinstance(outdated.exception, Refused) and outdated.stderr == f"warn: maze: {old}\n"


def test_the_losses_of_a_supervised_job_are_shown(api: type[FakeApi]) -> None:
    events = [metrics(1, step=1, version=1, reward_mean=None, loss=0.123456), metrics(2, version=1, eval_loss=0.5)]
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = events[::-1]
    assert "loss 0.123" in (printed := run("events", "ftjob-1")) and "eval_loss 0.5" in printed
    assert "step 1/2, loss 0.1235" in run("watch", "ftjob-1")


def test_jobs_are_read_page_by_page(api: type[FakeApi]) -> None:
    api.answers["GET", "/v1/fine_tuning/jobs"] = [{**JOB, "id": f"ftjob-{i}"} for i in range(5)]
    assert [job["id"] for job in json.loads(run("jobs", "--json"))] == [f"ftjob-{i}" for i in range(5)]
    assert len(json.loads(run("jobs", "--limit", "3", "--json"))) == 3
    assert "ftjob-4" in run("jobs")


def test_events_are_shown_oldest_first(api: type[FakeApi]) -> None:
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = EVENTS[::-1]
    assert [json.loads(line) for line in run("events", "ftjob-1", "--json").splitlines()] == EVENTS
    assert "step 2  reward_mean 0.9" in run("events", "ftjob-1")


def test_base_models_are_listed_with_what_they_rule_out(api: type[FakeApi]) -> None:
    source = f"store:q@{'0a' * 16}-{'1b' * 16}"  # copied to other machines' settings
    about = {"source": source, "num_weights": 596_049_920, "dtype": "bfloat16", "context": 3072}
    base = {
        "id": "q",
        "version": None,
        "base": {**about, "learning_rate": 1e-4, "rules_out": ["jobs of several turns"]},
    }
    api.answers["GET", "/v1/models"] = [{"id": "ft:q:acme::ftjob-1", "version": 3, "base": None}, base]
    assert json.loads(run("models", "--json"))[1] == base
    shown = run("models")
    assert "596 M" in shown and "3,072" in shown and source in shown
    assert "q rules out jobs of several turns" in shown and "ft:q:acme::ftjob-1@3" in shown


def test_a_broken_stream_of_events_is_resumed_where_it_broke(api: type[FakeApi]) -> None:
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-2"] = {**JOB, "status": "running"}
    api.drop_after = 2
    with Client(ClientSettings().url, KEY, reconnect_s=0.0) as client:
        following = client.follow("ftjob-2")  # does not end
        assert [next(following) for _ in EVENTS] == EVENTS
    assert len(run("events", "ftjob-1", "--follow", "--json").splitlines()) == 2  # has ended: not asked again


def test_a_program_submits_rows_and_waits(api: type[FakeApi]) -> None:
    rows = [{"messages": [{"role": "user", "content": "für 1\u2028"}], "answer": "1"}]
    api.answers = {("POST", "/v1/files"): {"id": "file-1"}, ("POST", "/v1/fine_tuning/jobs"): JOB}
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    with Client() as client:
        job = client.submit(rows, grader="math:answer", environment="calculator", hyperparameters={"max_steps": 2})
        assert client.wait(job["id"]) == JOB
        assert json.dumps(rows[0], ensure_ascii=False).encode() + b"\n" in api.requests[0][1]
        how = json.loads(api.requests[1][1])["method"]["reinforcement"]
        assert how["grader"]["reference"] == "{{item.answer}}" and how["environment"] == {"name": "calculator"}
        # and is told why, if the job failed
        api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = {
            **JOB,
            "status": "failed",
            "error": {"message": "NaN loss"},
        }
        with pytest.raises(JobFailed, match="ftjob-1 failed: NaN loss"):
            client.wait("ftjob-1")


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_a_job_is_told_what_to_do(api: type[FakeApi], verb: str) -> None:
    api.answers["POST", f"/v1/fine_tuning/jobs/ftjob-1/{verb}"] = {**JOB, "status": "paused"}
    assert run(verb, "ftjob-1").split() == ["ftjob-1", "paused"]


def test_watch_says_what_it_shows_nothing_of(api: type[FakeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["GET", "/v1/fine_tuning/jobs"] = []
    assert run("watch") == "No jobs yet: marlaas submit --help\n" and run("watch", "--json") == ""
    # And that an interrupted one ends no job
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = {**JOB, "status": "running"}
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = []

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    result = CliRunner().invoke(app, ["watch", "ftjob-1"])
    assert result.exit_code == 130 and "ftjob-1 goes on; to end it: marlaas cancel ftjob-1" in result.stderr


def test_watch_fails_with_the_reason_of_a_failed_job(api: type[FakeApi]) -> None:
    api.answers["GET", "/v1/fine_tuning/jobs"] = [JOB]
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = {**JOB, "status": "failed", "error": {"message": "NaN loss"}}
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = []
    with pytest.raises(ClientError, match="ftjob-1 failed: NaN loss"):
        run("watch")


HOSTILE = "\x1b[31m\x9b2J\rred\u202eder :x: [bold]b[/] \U000e0041 é中🙂"
SHOWN = r"\u001b[31m\u009b2J\rred\u202eder :x: [bold]b[/] \udb40\udc41 é中🙂"
"""Commands of a terminal, text that runs backwards, and what a table could take for markup or for emoji."""


def test_what_people_wrote_is_shown_and_never_sent_to_the_terminal(api: type[FakeApi]) -> None:
    failed = {**JOB, "status": "failed", "error": {"message": HOSTILE}, "user_provided_suffix": "s"}
    api.answers["GET", "/v1/fine_tuning/jobs"] = [failed]
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = failed
    event = {"id": "1", "created_at": 0, "level": "error", "type": "message", "message": HOSTILE, "data": {}}
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = [event]
    assert SHOWN in run("events", "ftjob-1")
    assert json.loads(run("events", "ftjob-1", "--json"))["message"] == HOSTILE
    for arguments in (("events", "ftjob-1", "--json"), ("jobs",), ("jobs", "--json")):
        printed = run(*arguments).replace("\n", "")
        assert not {unicodedata.category(c) for c in printed} & output.UNSEEN
        assert "\u274c" not in printed, "the emoji of that name"


def test_events_and_watch_say_why_a_step_warns(api: type[FakeApi]) -> None:
    # Given a job whose first step lost half of its trajectories to a grader that said something odd
    why = f"Step 1/2: reward 0.500; 50% of its trajectories failed, most of them: {HOSTILE}"
    event = {**metrics(1, step=1, version=1, reward_mean=0.5), "level": "warn", "message": why}
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1/events"] = [metrics(2, step=2, reward_mean=0.6), event]
    # Then both say so, as text
    said = (
        f"warn: Step 1/2: reward 0.500; 50% of its trajectories failed, most of them: {SHOWN}  step 1  reward_mean 0.5"
    )
    assert said in run("events", "ftjob-1")
    watched = run("watch", "ftjob-1").splitlines()
    assert watched[0].startswith("acme/sums: ") and watched[0].endswith(said)
    assert watched[1].startswith("acme/sums: succeeded")


def test_an_error_is_one_line_that_is_shown_and_not_sent_and_exit_status_1(tmp_path: Path) -> None:
    result = marlaas("submit", "\x1b[2J:x:\u202e.jsonl", "--grader", "math:answer", "--data", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no API key") and len(result.stderr.splitlines()) == 1
    (tmp_path / "api_key").write_text(KEY)
    result = marlaas("submit", "\x1b[2J:x:\u202e.jsonl", "--grader", "math:answer", "--data", str(tmp_path))
    assert (result.returncode, result.stderr) == (1, "error: \\u001b[2J:x:\\u202e.jsonl: No such file or directory\n")


def test_pull_unpacks_the_newest_version(api: type[FakeApi], tmp_path: Path) -> None:
    path = "/v1/fine_tuning/jobs/ftjob-1/checkpoints"
    api.answers["GET", path] = [{"id": "c2", "step_number": 2}, {"id": "c1", "step_number": 1}]
    api.answers["GET", f"{path}/2/content"] = archive("adapter_config.json")
    printed = json.loads(run("pull", "ftjob-1", "--to", str(tmp_path / "adapter"), "--json"))
    assert printed["version"] == 2
    assert (tmp_path / "adapter" / "adapter_config.json").read_text() == "{}"


def test_a_pulled_adapter_names_a_base_model_that_lies_here(api: type[FakeApi], tmp_path: Path) -> None:
    cluster = ClusterFile(url=ClientSettings().url, pid=1, redis_url="", bases={"tiny": str(TINY)})
    (tmp_path / CLUSTER_FILE).write_text(cluster.model_dump_json())
    path = "/v1/fine_tuning/jobs/ftjob-1/checkpoints/2/content"
    for name, named in (("tiny", str(TINY)), ("org/hub-model", "org/hub-model"), ("other", "other")):
        config = json.dumps({"r": 8, "base_model_name_or_path": name})
        api.answers["GET", path] = archive("adapter_config.json", config)
        run("pull", "ftjob-1", "--version", "2", "--to", str(tmp_path / "adapter"))
        told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert told == {"r": 8, "base_model_name_or_path": named}


def archive(name: str, content: str = "{}") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def test_an_archive_cannot_write_outside_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="outside"):
        unpack(archive("../stolen"), tmp_path / "adapter")
    assert not (tmp_path / "stolen").exists()
    with pytest.raises(InvalidInput):
        unpack(b"no zip", tmp_path / "adapter")


def test_usage_and_ledger(api: type[FakeApi]) -> None:
    counters = dict.fromkeys(account.COUNTERS, 7)
    row = {"job": "ftjob-1", **counters}
    report = {"data": [row], "total": {"job": None, **counters}}
    report |= {"tokens_today": 12_345, "max_tokens_per_day": 20_000}
    report |= {"stored_bytes": 54_321, "max_stored_bytes": 60_000}
    api.answers = {
        ("GET", "/v1/usage"): report,
        ("GET", "/v1/fine_tuning/jobs/ftjob-1/usage"): row,
        ("GET", "/v1/fine_tuning/jobs/ftjob-1/ledger"): dict.fromkeys(account.FATES, 5) | {"issued": 30},
    }
    assert "12,345 tokens today of 20,000" in (printed := run("usage"))
    assert "54,321 bytes stored of 60,000" in printed
    assert "ftjob-1" in printed and "total" in printed
    assert json.loads(run("usage", "--json")) == report
    assert "ftjob-1" in (printed := run("usage", "ftjob-1")) and "today" not in printed
    assert run("ledger", "ftjob-1").split()[-7:] == ["30", *["5"] * 6]


def kept(step: int, sample: int, reward: float | None, said: str) -> dict[str, Any]:
    turns = [{"by": "prompt", "text": "add 1+2"}, {"by": "model", "text": said}]
    failure = None if reward is not None else {"kind": "grader", "reason": "it raised"}
    about: dict[str, Any] = {"stop_reason": "stop", "reward_parts": {}, "failure": failure, "written": None}
    return {
        "step": step,
        "group": 1,
        "sample": sample,
        "prompt": "",
        "text": said,
        "reward": reward,
        "turns": turns,
        "verdicts": [{"grader": "tone", "prompt": "user: fair?", "reply": said}],
        **about,
    }


def as_lines(*samples: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(sample, ensure_ascii=False).encode() + b"\n" for sample in samples)


def test_samples_are_whole_conversations_in_80_columns(api: type[FakeApi]) -> None:
    hostile = "3\x1b[2J\u2028\x85\u202e" + 30 * "word " + "\nlast"
    path = "/v1/fine_tuning/jobs/ftjob-1/samples"
    api.answers = {
        ("GET", path): (200, as_lines(kept(12, 0, 0.5, hostile), kept(12, 1, 0.25, "4"), kept(12, 2, None, "x")))
    }
    printed = run("samples", "ftjob-1", "--step", "12")
    assert "step 12  group 1  sample 0  reward 0.5  stop" in printed and "grader: it raised" in printed
    assert "add 1+2" in printed and printed.count("word") == 60 and "  last" in printed.splitlines()
    assert "  [prompt of the grader tone]\n  user: fair?\n  [reply of the grader tone]\n  4\n" in printed
    assert r"3\u001b[2J\u2028\u0085\u202e" in printed and max(map(len, printed.splitlines())) <= 80
    assert all(c == "\n" or unicodedata.category(c) not in output.UNSEEN for c in printed)
    assert len(run("samples", "ftjob-1", "--jsonl").splitlines()) == 3
    assert json.loads(run("samples", "ftjob-1", "--json", "--limit", "1"))["text"] == hostile
    with pytest.raises(InvalidInput, match="one of"):
        run("samples", "ftjob-1", "--best", "--worst")
    answer = kept(12, 0, 0.5, "8") | {"item": 3, "version": 12, "kept": "evaluation"}
    api.answers = {("GET", path): (200, as_lines(answer))}
    assert "evaluation of version 12  held-out item 3  reward 0.5" in run("samples", "ftjob-1", "--item", "3")
    assert api.query == {"format": "jsonl", "evaluation": "true", "item": "3", "newest": "4"}
    run("samples", "ftjob-1", "--evaluation", "--step", "0")
    assert api.query == {"format": "jsonl", "evaluation": "true", "version": "0"}
    run("samples", "ftjob-1", "--step", "12")
    assert api.query == {"format": "jsonl", "version": "12"}


def test_the_best_and_the_worst_samples_come_first(api: type[FakeApi]) -> None:
    rows = [kept(2, sample, reward, "") for sample, reward in enumerate((0.5, 0.9, 0.1))]
    api.answers = {("GET", "/v1/fine_tuning/jobs/ftjob-1/samples"): (200, as_lines(*rows))}
    for option, expected in (("--best", [1, 0]), ("--worst", [2, 0])):
        lines = run("samples", "ftjob-1", option, "--limit", "2", "--json").splitlines()
        assert [json.loads(line)["sample"] for line in lines] == expected
    api.answers = {("GET", "/v1/fine_tuning/jobs/ftjob-1/samples"): (200, b"")}
    assert "No such samples" in run("samples", "ftjob-1", "--failed")
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = {**JOB, "version": 2}
    assert "no samples of step 99: the job is at step 2" in run("samples", "ftjob-1", "--step", "99")
    assert "No such samples" in run("samples", "ftjob-1", "--step", "2")


def test_logs_are_whole_messages_by_level(api: type[FakeApi]) -> None:
    events = [
        metrics(2, step=1) | {"level": "warn", "message": 500 * "w"},
        metrics(1) | {"type": "message", "message": "Job started"},
    ]
    api.answers = {("GET", "/v1/fine_tuning/jobs/ftjob-1/events"): [*events, metrics(0, step=0)]}
    printed = run("logs", "ftjob-1").splitlines()
    assert [line.split()[-1][:7] for line in printed] == ["started", 7 * "w"] and 500 * "w" in printed[1]
    assert len(run("logs", "ftjob-1", "--level", "warn").splitlines()) == 1


def test_chat_answers_once(api: type[FakeApi]) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "95"}}
    api.answers["POST", "/v1/chat/completions"] = {
        "id": "chat-1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice],
    }  # fmt: skip
    printed = json.loads(run("chat", "tiny", "add 37+58", "--json"))
    assert printed["choices"][0]["message"]["content"] == "95"
    assert json.loads(api.requests[0][1])["messages"] == [{"role": "user", "content": "add 37+58"}]

    # of a job, by its model
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = JOB
    run("chat", "ftjob-1", "add 37+58", "--json")
    assert json.loads(api.requests[-1][1])["model"] == JOB["fine_tuned_model"]
    run("chat", "ftjob-1@5", "add 37+58", "--json")
    assert json.loads(api.requests[-1][1])["model"] == f"{JOB['fine_tuned_model']}@5"
    api.answers["GET", "/v1/fine_tuning/jobs/ftjob-1"] = {**JOB, "fine_tuned_model": None}
    with pytest.raises(InvalidInput, match="ftjob-1 has no trained version yet"):
        run("chat", "ftjob-1", "add 37+58")


def test_chat_streams(api: type[FakeApi]) -> None:
    chunks = [
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny",
         "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}
        for part in ("9", "5")
    ]  # fmt: skip
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    api.answers["POST", "/v1/chat/completions"] = "".join([*lines, "data: [DONE]\n\n"]).encode()
    assert run("chat", "tiny", "add 37+58") == "95\n"


def test_workers_and_dead_letters(api: type[FakeApi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = {
        "id": "w",
        "service": "rollout",
        "pid": 7,
        "state": "busy",
        "busy": 0.5,
        "working_for": [{"tenant": "me"}],
    }
    letter = {"id": "d", "job": "ftjob-1", "stream": "env", "deliveries": 10, "reason": "poison"}
    paused = {**worker, "id": "v", "pid": 8, "state": "idle", "busy": 0.47}
    api.answers = {("GET", "/v1/cluster/workers"): [worker, paused], ("GET", "/v1/cluster/dead"): [letter]}
    api.answers["GET", "/v1/cluster/wanted"] = {}
    # both need the admin key, which lies in the data folder
    monkeypatch.delenv("MARLAAS_API_KEY")
    (tmp_path / "admin_key").write_text(f"{KEY}\n")
    assert "rollout 7" in (printed := run("workers"))
    assert "50%" in printed and "47%" in printed and "idle" not in printed
    assert "me" in printed
    assert "poison" in run("dead")
    # Given a worker with several base models in turn
    place = {"worker": "rollout-host-7-abc", "tier": "device", "opens_in_s": 0.0, "waiting_s": 0.0}
    shared = {**worker, "pool": place}
    closed = {**shared, "state": "closed", "busy": 0.0, "working_for": []}
    away = {**closed, "pool": {**place, "tier": "disk"}}
    rows = [("b", closed), ("tiny", shared), ("b", away), ("c", {**away, "state": "refused"})]
    rows.append(("b", {**closed, "state": "starting"}))
    records = [{**row, "id": str(pid), "pid": pid, "base_model": base} for pid, (base, row) in enumerate(rows)]
    api.answers["GET", "/v1/cluster/workers"] = {"data": records}
    wanted = {"turns": 9, "workers": 1, "bounds": "", "live": 0, "retires": ""}
    api.answers["GET", "/v1/cluster/wanted"] = {"b": wanted, "alone": wanted}
    assert "rollout 7: tiny ▸ b, c (refused)" in (printed := run("workers"))
    assert "alone: 9 turns" in printed and "b: 9 turns" not in printed
    # Given one that serves one base model, and is refused, and one that fetches it
    away = [{**worker, "state": "refused", "reason": "no bits"}, {**worker, "state": "starting", "reason": "43% of it"}]
    api.answers["GET", "/v1/cluster/workers"] = [{**one, "id": one["state"], "pool": None} for one in away]
    printed = run("workers")
    assert all(words in printed for words in ("refused", "no bits", "starting", "43% of it"))
    assert json.loads(run("dead", "--json")) == [letter]


def test_an_operator_makes_a_tenant_with_a_key_and_changes_its_quota(api: type[FakeApi]) -> None:
    tenant = {
        "id": "alpha",
        "name": "A",
        "weight": 2.0,
        "max_jobs": 4,
        "max_tokens_per_day": None,
        "max_stored_bytes": 9,
    }
    admin = "/v1/admin/tenants"
    api.answers = {
        ("POST", admin): tenant,
        ("GET", admin): [tenant],
        ("POST", f"{admin}/alpha"): tenant,
        ("POST", f"{admin}/alpha/keys"): {"id": "key-1", "key": "sk-new"},
    }
    assert run("tenants", "add", "alpha", "--weight", "2") == "sk-new\n" == run("tenants", "key", "alpha")
    assert json.loads(api.requests[0][1]) == {"id": "alpha", "name": "", "weight": 2.0}
    assert run("tenants", "list").split()[-6:] == ["alpha", "A", "2", "4", "none", "9"]
    changed = run(
        "tenants",
        "quota",
        "alpha",
        "--max-jobs",
        "4",
        "--max-tokens-per-day",
        "none",
        "--max-stored-bytes",
        "20GB",
        "--json",
    )
    assert json.loads(changed) == [tenant]
    assert json.loads(api.requests[-1][1]) == {
        "max_jobs": 4,
        "max_tokens_per_day": None,
        "max_stored_bytes": 20 * 10**9,
    }
    with pytest.raises(InvalidInput, match="--max-tokens-per-day many"):
        run("tenants", "quota", "alpha", "--max-tokens-per-day", "many")
    with pytest.raises(InvalidInput, match="--max-stored-bytes much: a size such as 20GB, or none"):
        run("tenants", "quota", "alpha", "--max-stored-bytes", "much")


def test_the_version_is_said_without_a_command() -> None:
    assert re.fullmatch(r"marlaas (\d+\.\d+\.\d+|from a folder)\n", run("--version"))


def test_an_example_runs_by_its_name_and_gets_what_follows_it() -> None:
    assert "quickstart" in run("example")
    helped = marlaas("example", "quickstart", "--help")
    assert helped.returncode == 0 and "--steps" in helped.stdout
    with pytest.raises(MarlaasError, match="no example 'quick': demo, "):
        run("example", "quick")


@pytest.mark.parametrize(("name", "needs"), [("tinker_loop", "pip install tinker"), ("tinker_demo", "`make tinker`")])
def test_an_example_that_lacks_something_says_in_one_line_what(name: str, needs: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"examples.{name}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 1 and told.stderr.startswith("error: ") and needs in told.stderr
    assert told.stderr.count("\n") == 1, told.stderr


def test_a_command_to_type_next_is_written_as_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / ".venv" / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert output.typed() == "marlaas", "it is installed in another folder than Python"
    (own / "marlaas").touch(0o755)
    assert output.typed() == str(own / "marlaas")
    monkeypatch.chdir(tmp_path)
    assert output.typed() == ".venv/bin/marlaas"
    monkeypatch.setenv("PATH", str(own))
    assert output.typed() == "marlaas", "the environment is active"


def test_the_client_alone_names_the_package_of_what_it_lacks() -> None:
    for command in (["plan", "--base", "x"], ["pull", "ftjob-1", "--merged", "x"], ["tenants", "list"]):
        told = subprocess.run(
            [sys.executable, "-m", "marlaas_client.cli.main", *command], capture_output=True, text=True, check=False
        )
        assert told.returncode == 1 and "pip install marlaas" in told.stderr


def test_a_watched_job_ends_with_its_models_name_and_what_comes_next(api: type[FakeApi]) -> None:
    api.answers = {
        ESTIMATED: ESTIMATE,
        ("POST", "/v1/fine_tuning/jobs"): JOB,
        ("GET", "/v1/fine_tuning/jobs/ftjob-1"): JOB,
        ("GET", "/v1/fine_tuning/jobs/ftjob-1/events"): EVENTS[::-1],
    }
    told = CliRunner().invoke(app, ["submit", "--environment", "calculator", "--watch"]).stderr
    assert "ft:tiny:acme:sums:ftjob-1" in told and "marlaas chat ftjob-1" in told and "marlaas pull ftjob-1" in told


def test_an_error_of_a_file_says_which(api: type[FakeApi], tmp_path: Path) -> None:
    (train := tmp_path / "train.jsonl").write_text("{}\n")
    api.answers = {("POST", "/v1/files"): (400, {"error": {"message": "line 1: no messages"}})}
    with pytest.raises(Refused, match=r"^training_file: line 1: no messages"):
        run("submit", str(train), "--grader", "math:answer")


def test_errors_are_the_apis_own_words(api: type[FakeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClientError, match=r"^no such thing: /v1/fine_tuning/jobs/ftjob-9/cancel$"):
        run("cancel", "ftjob-9")
    monkeypatch.setenv("MARLAAS_API_KEY", "sk-wrong")
    with pytest.raises(ClientError, match=r"^this API key is not known$"):
        run("jobs")


def test_without_a_server_or_a_key_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)
    with pytest.raises(InvalidInput, match="MARLAAS_API_KEY"):
        run("jobs", "--data", str(tmp_path))
    (tmp_path / "api_key").write_text(KEY)
    with pytest.raises(ClientError, match="is `marlaas up` running"):
        run("jobs", "--data", str(tmp_path), "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://[::1", "http://a:b/", "http://a:99999", "http://a..b", "host:8000"])
def test_what_is_no_url_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"the API's URL .* (is not a URL|must be|the port)"):
        run("jobs", "--url", url)


def test_the_key_of_this_machines_cluster_is_sent_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)
    (tmp_path / "api_key").write_text(KEY)
    with pytest.raises(InvalidInput, match=r"set MARLAAS_API_KEY to one of http://elsewhere\.example"):
        run("jobs", "--data", str(tmp_path), "--url", "http://elsewhere.example/v1")


@pytest.mark.parametrize(
    ("text", "type_"),
    [("math:answer", "math"), ("text_similarity:answer", "text_similarity"), ('{"type": "python"}', "python")],
)
def test_graders(text: str, type_: str) -> None:
    assert parse_grader(text)["type"] == type_


def test_a_file_of_python_is_a_grader(tmp_path: Path) -> None:
    (file := tmp_path / "judge.py").write_text(source := "def grade(sample, item):\n    return 1.0\n")
    assert parse_grader(f"@{file}") == {"type": "python", "name": "judge", "source": source}


@pytest.mark.parametrize("text", ["math", "maths:answer", "math:", "{no json", "[1]", "@/no/such/file"])
def test_what_is_no_grader_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_grader(text)


def test_shorthands() -> None:
    assert parse_environment("calculator") == {"name": "calculator"}
    assert parse_environment('{"name": "search"}') == {"name": "search"}
    assert parse_hyper("learning_rate=1e-4") == ("learning_rate", 1e-4)
    assert parse_hyper("lora_targets=q_proj") == ("lora_targets", "q_proj")
    with pytest.raises(InvalidInput):
        parse_hyper("max_steps")


@pytest.mark.parametrize(
    ("tenant", "label", "num_steps", "shown"),
    [("bluebird", "reverse", 40, "curve"), ("", "", 40, "tokens/s"), ("", "", 1000, "eval")],
)
def test_the_live_view_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, tenant: str, label: str, num_steps: int, shown: str
) -> None:
    monkeypatch.setattr(output.console, "width", 80)
    jobs = [JobProgress(f"ftjob-{i:024}", tenant=tenant, label=label, num_steps=num_steps) for i in range(6)]
    for job in jobs:
        for step in range(1, 40):
            job.add(metrics(step, step=step, reward_mean=0.5, eval_reward_mean=0.52, version=step % 2), now=float(step))
        job.status = "running"
    with output.console.capture() as capture:
        output.console.print(live_view(jobs, [], 40.0))
    lines = capture.get().splitlines()
    assert len(lines) == 2 + len(jobs) and max(map(len, lines)) <= 80
    assert shown in lines[0] and "eval" in lines[0]
    assert all((label or job.job) in line and "0.52 → 0.52" in line for job, line in zip(jobs, lines[2:], strict=True))


def test_error_messages_of_other_servers() -> None:
    assert error_message(502, "<html>bad gateway</html>") == "status 502: <html>bad gateway</html>"
