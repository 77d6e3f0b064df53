"""The client: what the SDK of OpenAI lacks for this service, and that SDK itself as `Client.openai`."""

import json
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, cast
from urllib.parse import quote

import httpx

from marlaas_client.adapters import (
    CONFIG,
    WEIGHTS,
    Pulled,
    check_folder,
    content_path,
    folder_name,
    name_base,
    says_version,
    unpack,
)
from marlaas_client.errors import ClientError, InvalidInput, JobFailed, Refused, Unavailable
from marlaas_client.place import find
from marlaas_client.records import FINAL, Event, Job, Ledger, Record, Sample
from marlaas_client.submission import GivenItems, Method, content_of, grader_of, request_of

if TYPE_CHECKING:
    from openai import OpenAI

JobAction = Literal["cancel", "pause", "resume"]
JOBS = "/v1/fine_tuning/jobs"
PAGE = 100
RECONNECT_S = 1.0
MAX_RECONNECTS = 30


class Client:
    """Raises Refused for an error answer, Unavailable if nothing answers."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        data: Path | None = None,
        admin: bool = False,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """A client of the API at `url`; what is not given is looked for as `place.find` says. Raises InvalidInput."""
        self.base_url, self._key, self.bases = find(url, key, data, admin=admin)
        self._reconnect_s = reconnect_s
        headers = {"Authorization": f"Bearer {self._key}"}
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=60.0, verify=certificates())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        if "openai" in self.__dict__:  # it was used
            self.openai.close()

    @cached_property
    def openai(self) -> "OpenAI":
        """OpenAI's SDK for this service: chat, files, jobs."""
        from openai import OpenAI  # imported here: it takes a second, and few calls need it

        return OpenAI(base_url=f"{self.base_url}/v1", api_key=self._key, max_retries=1)

    # ---- jobs

    def submit(
        self,
        items: GivenItems | None = None,
        *,
        grader: str | Record | None = None,
        environment: str | Record | None = None,
        hyperparameters: Record | None = None,
        method: Method = "reinforcement",
        validation: GivenItems | None = None,
        model: str = "",
        adapter: Path | None = None,
        suffix: str | None = None,
        seed: int | None = None,
        log: Sequence[str] = (),
    ) -> Job:
        """Uploads the items and creates a job. `model`: a base model, or a tuned one, or its job, to go on from; `adapter`: a folder with
        an adapter of the base, to go on from. `grader`, `environment`: as the API takes it, or short, `string_check:answer`, or a name;
        some environments make items themselves. `log`: loggers that the figures go to, `wandb:PROJECT`."""
        how = {
            "grader": grader_of(grader) if isinstance(grader, str) else grader,
            "environment": {"name": environment} if isinstance(environment, str) else environment,
            "hyperparameters": hyperparameters,
        }
        request = request_of(method, how, model=model, training_file=None, suffix=suffix, seed=seed, log=log)
        if adapter is not None:
            check_folder(adapter)
        request["model"] = self.model_of(model)
        with ExitStack() as unused:
            for field, given in (("training_file", items), ("validation_file", validation)):
                if given is not None:
                    self.attach(request, field, self.upload(*content_of(given))["id"], unused)
            if adapter is not None:
                self.attach(request, "adapter_file", self.upload_adapter(adapter)["id"], unused)
            job = self.create(request)
            unused.pop_all()
        return job

    def attach(self, request: Record, field: str, file: str, unused: ExitStack) -> None:
        """Puts an uploaded file into a request. At its end `unused` deletes it, unless a job has it."""
        unused.callback(self.discard, file)
        request[field] = file

    def create(self, request: Record) -> Job:
        """Creates a job, as `request_of` describes it."""
        return cast(Job, self.post(JOBS, request))

    def estimate(self, request: Record) -> Record:
        """The needs of such a job."""
        return self.post(f"{JOBS}/estimate", request)

    def job(self, job: str) -> Job:
        return cast(Job, self.get(f"{JOBS}/{job}"))

    def jobs(self) -> Iterator[Job]:
        """Newest first."""
        return cast(Iterator[Job], self.items(JOBS))

    def act(self, job: str, verb: JobAction) -> Job:
        """Ends a job, frees its workers, or goes on with it."""
        return cast(Job, self.post(f"{JOBS}/{job}/{verb}"))

    def events(self, job: str) -> list[Event]:
        """The events so far, oldest first."""
        return cast(list[Event], list(self.items(f"{JOBS}/{job}/events"))[::-1])

    def follow(self, job: str) -> Iterator[Event]:
        """A job's events, oldest first, until the job has ended. A broken connection is resumed where it broke."""
        last, num_failures = "", 0
        while True:
            try:
                for number, event in self._stream(f"{JOBS}/{job}/events", last):
                    last, num_failures = number or last, 0
                    yield cast(Event, event)
            except Unavailable:
                num_failures += 1
                if num_failures > MAX_RECONNECTS:
                    raise
            if self._has_ended(job):
                return
            time.sleep(self._reconnect_s)

    def wait(self, job: str) -> Job:
        """The job when it has ended, or was cancelled. Raises JobFailed if it failed."""
        for _ in self.follow(job):
            pass
        ended = self.job(job)
        if error := ended["error"]:
            raise JobFailed(f"{job} failed: {error['message']}")
        return ended

    def samples(self, job: str, **which: Any) -> Iterator[Sample]:
        """Samples, with rewards. `version=3`: of one step; `newest=1`: of the last; `failed=True`: without a reward."""
        return cast(Iterator[Sample], self.lines(f"{JOBS}/{job}/samples", format="jsonl", **which))

    def ledger(self, job: str) -> Ledger:
        """The fate of each of a job's trajectories."""
        return cast(Ledger, self.get(f"{JOBS}/{job}/ledger"))

    def pull(self, name: str, *, version: int | None = None, to: Path | None = None) -> Pulled:
        """Downloads an adapter: the newest version of a job or of a model, ft:… or tinker://…, if none is given. `to`: the folder.

        Raises InvalidInput if there is none yet, or if a version is given beside a name that says it.
        """
        if version is not None and says_version(name):
            raise InvalidInput(f"{name} says the version: leave it out")
        chosen = self._newest_version(name) if version is None else version
        of_job = f"{JOBS}/{name}/checkpoints/{chosen}/content"
        content = self.download(content_path(name, chosen) if ":" in name else of_job)
        folder = to or Path(f"{folder_name(name)}-{chosen}")
        files = unpack(content, folder)
        name_base(folder / CONFIG, self.bases)
        return Pulled(chosen, folder, files)

    def model_of(self, name: str) -> str:
        """The name of the model that a job trains: of `ftjob-…`, or of `ftjob-…@5`, which pins the version; other names stay as they are.
        Raises InvalidInput if there is none yet."""
        job, at, version = name.partition("@")
        if not job.startswith("ftjob-"):
            return name
        model = self.job(job)["fine_tuned_model"]
        if not model:
            raise InvalidInput(f"{job} has no trained version yet")
        return f"{model}{at}{version}"

    def _newest_version(self, name: str) -> int:
        """The newest version of a job, or the version that a model's name means."""
        if ":" in name:
            pinned = name.partition("@")[2]
            return int(pinned if pinned.isdecimal() else self.get(f"/v1/models/{quote(name, safe='')}")["version"])
        for checkpoint in self.items(f"{JOBS}/{name}/checkpoints"):
            return int(checkpoint["step_number"])
        raise InvalidInput(f"{name} has no trained version yet")

    # ---- any call of the API

    def get(self, path: str, **params: Any) -> Record:
        return self._send("GET", path, params=params).json()

    def post(self, path: str, body: Record | None = None) -> Record:
        return self._send("POST", path, json=body or {}).json()

    def delete(self, path: str) -> Record:
        return self._send("DELETE", path).json()

    def discard(self, file: str) -> None:
        """Deletes a file that no job needs; leaves one that cannot be deleted."""
        with suppress(ClientError):
            self.delete(f"/v1/files/{file}")

    def upload(self, filename: str, content: bytes | BinaryIO) -> Record:
        """A file of items in JSONL, which the API checks line by line."""
        files = {"file": (filename, content, "application/jsonl")}
        return self._send("POST", "/v1/files", files=files, data={"purpose": "fine-tune"}).json()

    def upload_adapter(self, folder: Path) -> Record:
        """An adapter as PEFT's `save_pretrained` writes it, for a job to go on from. Raises InvalidInput."""
        try:
            config = (folder / CONFIG).read_text("utf-8")
            with (folder / WEIGHTS).open("rb") as content:
                form = {"purpose": "adapter", "adapter_config": config}
                return self._send("POST", "/v1/files", files={"file": (WEIGHTS, content)}, data=form).json()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{folder}: {error}: a folder as PEFT's save_pretrained writes it is needed") from error

    def download(self, path: str) -> bytes:
        return self._send("GET", path).content

    def items(self, path: str, **params: Any) -> Iterator[Record]:
        """All items of a list, page by page, newest first."""
        after: Record = {}
        while True:
            page = self.get(path, limit=PAGE, **params, **after)
            yield from page["data"]
            if not page.get("has_more") or not page["data"]:
                return
            after = {"after": page["data"][-1]["id"]}

    def lines(self, path: str, **params: Any) -> Iterator[Record]:
        """The objects of an answer in JSONL, as they come."""
        try:
            with self._http.stream("GET", path, params=params) as response:
                if response.is_error:
                    response.read()
                _raise_for(response)
                yield from map(json.loads, _lines(response.iter_bytes()))
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    def _has_ended(self, job: str) -> bool:
        try:
            return self.get(f"{JOBS}/{job}")["status"] in FINAL
        except Unavailable:
            return False

    def _stream(self, path: str, last: str) -> Iterator[tuple[str, Record]]:
        headers = {"Last-Event-ID": last} if last else {}
        try:
            with self._http.stream("GET", path, params={"stream": "true"}, headers=headers) as response:
                if response.is_error:
                    response.read()
                _raise_for(response)
                yield from server_sent_events(response.iter_lines())
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unavailable(error) from error
        _raise_for(response)
        return response

    def _unavailable(self, error: Exception) -> Unavailable:
        what = str(error) or type(error).__name__
        return Unavailable(f"no answer from {self.base_url} ({what}); is `marlaas up` running?")


def _lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Lines that a line feed alone ends: JSON has other line ends of Unicode within texts."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from filter(None, lines)
    if rest:
        yield rest


def server_sent_events(lines: Iterator[str]) -> Iterator[tuple[str, Record]]:
    """(id or "", data) of each event; ends with the lines, or at `[DONE]`."""
    number = ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            number = value
        elif field == "data":
            if value == "[DONE]":
                return
            yield number, json.loads(value)


@cache
def certificates() -> ssl.SSLContext:
    """The certificates that httpx trusts: loading them takes longer than a request, so that all clients of a process share them."""
    return httpx.create_ssl_context()


def _raise_for(response: httpx.Response) -> None:
    if response.is_error:
        raise Refused(error_message(response.status_code, response.text), response.status_code)


def error_message(status: int, text: str) -> str:
    """The message in an error of OpenAI's shape; the text itself if it has another shape."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {text[:500].strip()}"
