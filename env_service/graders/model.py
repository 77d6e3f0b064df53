"""The graders that are models: what the model is asked, and what its answer means.

A grader asks a model of this service by raising ModelAsked, and finds the answer when it runs again (`judging.py`).
`ModelEndpoints` asks models elsewhere, at hosts that the operator allows, checked as for `endpoint` graders. A key goes only
to the address for which the operator gave it; a tenant neither gives nor sees one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import httpx

from common.errors import InvalidInput
from common.sharing.places import Places
from common.tasks import templates
from common.tasks.graders import AnyModelGrader, LabelModel, ScoreModel
from common.text.chat_template import KWARGS
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints

MAX_TOKENS = 64
MAX_SHOWN = 4000
"""Characters of a question, and of its answer, that are kept to be read."""

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def answered(self, grader: str, answer: str) -> dict[str, str]:
        """Returns one of a trajectory's `verdicts`."""
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
        return {"grader": grader, "prompt": prompt[:MAX_SHOWN], "reply": answer[:MAX_SHOWN]}


class ModelAsked(Exception):
    """No failure: the grading goes on once a model of this service has answered."""

    def __init__(self, grader: str, question: ModelQuestion) -> None:
        """`grader`: its name in a `multi`, "" for a single one."""
        super().__init__(f"{question.model} is asked")
        self.grader = grader
        self.question = question


def question_of(grader: AnyModelGrader, attempt: Attempt) -> ModelQuestion:
    """Raises InvalidInput, naming the variable, if a template cannot be filled; also for too long a question."""
    sampling, messages, length = grader.sampling_params, list[dict[str, str]](), 0
    for message in grader.input:
        messages.append({"role": message.role, "content": templates.render(message.text, attempt.item, attempt.sample)})
        length += len(messages[-1]["content"])
        if length > templates.MAX_TEXT_CHARACTERS:
            raise InvalidInput(f"the question to the model has more than {templates.MAX_TEXT_CHARACTERS:,} characters")
    return ModelQuestion(
        model=grader.model,
        messages=messages,
        max_tokens=sampling.max_completions_tokens or MAX_TOKENS,
        temperature=sampling.temperature or 0.0,
        top_p=sampling.top_p or 1.0,
        seed=sampling.seed,
        chat_template_kwargs=grader.chat_template_kwargs,
    )


def reward_of(grader: AnyModelGrader, answer: str) -> float:
    """Raises GraderFailed for an answer that is neither a number of the range nor a label."""
    result = _result(answer)
    if isinstance(grader, ScoreModel):
        return _score(grader, result)
    return _passes(grader, result)


def _result(answer: str) -> Any:
    """`result` of a JSON object, else the text itself."""
    try:
        value: Any = json.loads(answer)
    except (ValueError, RecursionError):
        return answer.strip()
    if isinstance(value, Mapping):
        return cast(Mapping[str, Any], value).get("result")
    return answer.strip()


def _score(grader: ScoreModel, result: Any) -> float:
    if isinstance(result, str) and _NUMBER.fullmatch(result):
        result = float(result)
    low, high = grader.range
    if isinstance(result, bool) or not isinstance(result, int | float) or result != result:
        raise GraderFailed(f"score_model: the model answered {_shown(result)}, not one number")
    if not low <= result <= high:
        raise GraderFailed(f"score_model: the model answered {_shown(result)}, outside of {low:g} to {high:g}")
    return float(result)


def _passes(grader: LabelModel, result: Any) -> float:
    if result not in grader.labels:
        raise GraderFailed(f"label_model: the model answered {_shown(result)}, not one of the labels")
    return float(result in grader.passing_labels)


def _shown(result: Any) -> str:
    return "nothing" if result in (None, "") else repr(result)[:60]


# ---- models outside of this service ---------------------------------------------------------------------------------


class ModelEndpoints:
    """Asks models. `close` when done."""

    def __init__(self, endpoints: Endpoints, keys: str = "", *, timeout_s: float = 60.0, most: int = 8) -> None:
        """`keys`: see `read_keys`. `timeout_s`: of a question. `most`: a tenant's questions at once."""
        self._endpoints = endpoints
        self._keys = read_keys(keys)
        self._timeout_s = timeout_s
        self._most = most
        self._places: WeakValueDictionary[str, Places] = WeakValueDictionary()
        self.close = endpoints.close

    async def ask(self, url: str, question: ModelQuestion, *, key: str) -> str:
        """The answer's text. `key` lets the endpoint recognise a repeat. Raises GraderFailed."""
        places = self._places.setdefault(work.current().tenant, Places(lambda: self._most))
        target = f"{url.rstrip('/')}/chat/completions"
        secret = self._keys.get(_origin(target))
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        async with work.place(places):
            body = await self._endpoints.post(target, headers, _body(question), key=key, timeout_s=self._timeout_s)
        return _answer(body)


def read_keys(text: str) -> dict[str, str]:
    """`https://api.example.org=sk-…,https://…` -> a key by its address. Raises InvalidInput."""
    keys: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        address, equals, key = part.partition("=")
        try:
            origin = _origin(address)
        except httpx.InvalidURL:
            origin = ""
        if (
            not equals
            or not key
            or not origin.startswith(("https://", "http://"))
            or not (key.isascii() and key.isprintable())
        ):
            raise InvalidInput("MARLAAS_GRADER_KEYS: write https://host=key, comma-separated")
        keys[origin] = key
    return keys


def _origin(url: str) -> str:
    """Scheme, host and port."""
    parsed = httpx.URL(url)
    port = parsed.port or {"https": 443, "http": 80}.get(parsed.scheme)
    return f"{parsed.scheme}://{parsed.host.lower().rstrip('.')}:{port}"


def _body(question: ModelQuestion) -> bytes:
    optional = {"seed": question.seed, KWARGS: question.chat_template_kwargs}
    body: dict[str, Any] = {
        "model": question.model,
        "messages": question.messages,
        "max_completion_tokens": question.max_tokens,
        "temperature": question.temperature,
        "top_p": question.top_p,
    }
    return json.dumps(body | {name: value for name, value in optional.items() if value is not None}).encode()


def _answer(body: bytes) -> str:
    try:
        answer: Any = json.loads(body)
        content = answer["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise GraderFailed("the model's endpoint: the answer is no chat completion") from error
    if not isinstance(content, str):
        raise GraderFailed("the model's endpoint: the model answered no text")
    usage: Any = cast(Mapping[str, Any], answer).get("usage")
    total: Any = cast(Mapping[str, Any], usage).get("total_tokens") if isinstance(usage, Mapping) else None
    if isinstance(total, int) and 0 < total < 1 << 31:
        work.current().grader_tokens += total
    return content
