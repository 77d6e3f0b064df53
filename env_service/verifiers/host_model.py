"""The model for a package's environment: HTTP at a port of the host's own. Part of the program `host.py`."""

import asyncio
import concurrent.futures
import functools
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BYTES = 64 * 1024 * 1024
"""Bytes of what the package asks, or the worker says."""
MODEL = "policy"
SESSION_HEADER = "X-Session-ID"


class ModelRefused(Exception):
    """The model does not answer."""


class ModelServer(ThreadingHTTPServer):
    """The model, as environments see it: one of OpenAI's API, or of vLLM's generation by token ids."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, key: str) -> None:
        super().__init__(("127.0.0.1", 0), ModelHandler)
        self.key = key
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.loop: Any = None
        self.episode_of: Any = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def ask(self, session: str, request: "dict[str, Any]") -> "dict[str, Any]":
        """Called in a request's thread. Raises ModelRefused."""
        episode = self.episode_of(session)
        if episode is None:
            raise ModelRefused("there is no such session")
        try:
            return asyncio.run_coroutine_threadsafe(episode.ask(request), self.loop).result()
        except concurrent.futures.CancelledError as error:
            raise ModelRefused("the trajectory has ended") from error


class ModelHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            self._error(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        body = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), MAX_BYTES))
        if not hmac.compare_digest(self.headers.get("Authorization") or "", f"Bearer {self.server.key}"):
            return self._error(401, "wrong key")
        routes = {"/inference/v1/generate": generate, "/v1/chat/completions": complete}
        if self.path not in routes:
            return self._error(404, f"there is no {self.path}; there are {', '.join(routes)}")
        try:
            ask = functools.partial(self.server.ask, self.headers.get(SESSION_HEADER) or "")
            answer = routes[self.path](json.loads(body), ask)
        except (ModelRefused, ValueError, LookupError, TypeError) as error:
            return self._error(400, str(error))
        self._reply(200, answer)

    def _error(self, status: int, message: str) -> None:
        self._reply(
            status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        )

    def _reply(self, status: int, content: "dict[str, Any]") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def generate(body: "dict[str, Any]", ask: Any) -> "dict[str, Any]":
    """vLLM's `/inference/v1/generate`: tokens in, tokens with their log-probs out."""
    refuse_grammars(body.get("sampling_params") or {})
    answer = ask({"tokens": [int(token) for token in body["token_ids"]]})
    pairs = zip(answer["tokens"], answer["logprobs"], strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    finish = "length" if answer["finish"] == "length" else "stop"
    choice = {"index": 0, "token_ids": answer["tokens"], "logprobs": {"content": content}, "finish_reason": finish}
    return {"request_id": "marlaas", "choices": [choice]}


def complete(body: "dict[str, Any]", ask: Any) -> "dict[str, Any]":
    """OpenAI's `/v1/chat/completions`, of one choice and without streaming."""
    if body.get("stream") or (body.get("n") or 1) != 1:
        raise ValueError("this model gives one whole completion: no `stream`, no `n`")
    refuse_grammars(body)
    answer = ask({"messages": body["messages"], "tools": body.get("tools") or []})
    message: dict[str, Any] = {"role": "assistant", "content": answer["text"]}
    if answer["calls"]:
        message["tool_calls"] = answer["calls"]
    choice = {"index": 0, "message": message, "finish_reason": answer["finish"], "logprobs": None}
    about = {"id": "chatcmpl-marlaas", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
    counts = {"prompt_tokens": 0, "completion_tokens": len(answer["tokens"]), "total_tokens": len(answer["tokens"])}
    return {**about, "choices": [choice], "usage": counts}


def refuse_grammars(asked: "dict[str, Any]") -> None:
    """Raises ValueError where what is sampled would have to follow one: the loss would compare other distributions."""
    free = {"response_format": ({"type": "text"},), "tool_choice": ("auto", "none"), "structured_outputs": ()}
    if any(asked.get(name) and asked[name] not in values for name, values in free.items()):
        raise ValueError(
            "a job's samples follow no grammar: leave out response_format, structured_outputs and a tool_choice but auto"
        )
