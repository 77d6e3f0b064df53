"""The calls of the HTTP API that the commands use."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import httpx

from common.adapters import PEFT_FILES
from common.errors import MarlaasError, Unavailable

Record = dict[str, Any]
"""An object of the API, as its JSON has it."""

JOBS = "/v1/fine_tuning/jobs"
FINAL = frozenset({"succeeded", "failed", "cancelled"})
PAGE = 100
RECONNECT_S = 1.0
MAX_RECONNECTS = 30


class Refused(MarlaasError):
    """The API answered with an error; the message is its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Raises Refused for an error answer, Unavailable if nothing answers."""

    def __init__(self, base_url: str, key: str, *, reconnect_s: float = RECONNECT_S) -> None:
        self.base_url = base_url
        self.key = key
        self._reconnect_s = reconnect_s
        self._http = httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Record:
        return self._send("GET", path, params=params).json()

    def post(self, path: str, body: Record | None = None) -> Record:
        return self._send("POST", path, json=body or {}).json()

    def upload(self, filename: str, content: bytes | BinaryIO) -> Record:
        """A file of items, which the API checks line by line."""
        files = {"file": (filename, content, "application/jsonl")}
        return self._send("POST", "/v1/files", files=files, data={"purpose": "fine-tune"}).json()

    def upload_adapter(self, folder: Path) -> Record:
        """An adapter in PEFT's form. Raises OSError."""
        weights, config = (folder / name for name in PEFT_FILES)
        form = {"purpose": "adapter", "adapter_config": config.read_text()}
        with weights.open("rb") as content:
            return self._send("POST", "/v1/files", files={"file": (weights.name, content)}, data=form).json()

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

    def follow(self, job: str) -> Iterator[Record]:
        """A job's events, oldest first, until the job has ended. A broken connection is resumed where it broke."""
        last, num_failures = "", 0
        while True:
            try:
                for number, event in self._stream(f"{JOBS}/{job}/events", last):
                    last, num_failures = number or last, 0
                    yield event
            except Unavailable:
                num_failures += 1
                if num_failures > MAX_RECONNECTS:
                    raise
            if self._has_ended(job):
                return
            time.sleep(self._reconnect_s)

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


def _raise_for(response: httpx.Response) -> None:
    if response.is_error:
        raise Refused(error_message(response.status_code, response.text), response.status_code)


def error_message(status: int, text: str) -> str:
    """The message in an error of OpenAI's shape; the text itself if it has another shape."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {text[:500].strip()}"
