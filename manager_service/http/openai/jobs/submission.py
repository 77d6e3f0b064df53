"""Parses the body of `POST /v1/fine_tuning/jobs`, by itself: `job_checks` then checks it against all that there is."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Field

from common.errors import InvalidInput
from common.suggestions import cut, did_you_mean, quoted
from common.tasks.environments import SUPERVISED
from common.text.tokens import ChatTokenizer
from common.wire.messages import EnvSpec
from manager_service.http.openai.jobs.hyperparameters import (
    PARAM,
    SUPERVISED_NAMES,
    SUPERVISED_PARAM,
    Hyperparameters,
    as_given,
    parse_hyperparameters,
    resolve,
    supervised,
)
from manager_service.http.openai.jobs.integrations import IntegrationGiven
from manager_service.http.schemas import Given
from manager_service.records.job_records import Hyper
from manager_service.records.keys import JSON
from manager_service.scheduling.policies import Policy

MAX_METHOD_BYTES = 384 << 10
"""Bytes of a job's grader, environment and hyperparameters, which travel in messages and in lists of jobs."""
METHOD = "method.reinforcement"

_SUFFIX = re.compile(r"[A-Za-z0-9_.-]*")
_METHODS = ("reinforcement", "supervised")


class EnvironmentGiven(Given):
    name: str
    args: dict[str, Any] = {}


class ReinforcementGiven(Given):
    grader: dict[str, Any] | None = None
    environment: EnvironmentGiven | None = None
    hyperparameters: dict[str, Any] | None = None


class SupervisedGiven(Given):
    hyperparameters: dict[str, Any] | None = None


class MethodGiven(Given):
    type: str
    reinforcement: ReinforcementGiven | None = None
    supervised: SupervisedGiven | None = None
    dpo: Any = None


Label = Annotated[str, Field(max_length=512)]


class JobGiven(Given):
    """The body. `model` is a base model, or a tuned one, `ft:…`, to go on from; else the job trains `tiny`, or the only base. Without
    a `seed` the service chooses one, and returns it.
    """

    model: str = ""
    adapter_file: str | None = Field(
        None, description="A file of purpose `adapter`, of the base `model`, to go on from"
    )
    training_file: str | None = None
    validation_file: str | None = None
    method: MethodGiven | None = None
    suffix: str | None = Field(None, max_length=64)
    seed: int | None = Field(None, ge=0, lt=2**53)
    metadata: dict[str, Label] | None = Field(None, max_length=16)
    integrations: list[IntegrationGiven] | None = Field(None, max_length=4)
    webhooks: bool = Field(True, description="Do your webhooks hear of its end?")
    hyperparameters: dict[str, Any] | None = Field(
        None, description="OpenAI's old place for them: of a job without `method`, which is supervised"
    )


@dataclass(frozen=True, slots=True)
class Submission:
    """A body that is right in itself."""

    body: JobGiven
    is_supervised: bool
    env: EnvSpec
    given: Hyperparameters
    method: dict[str, Any]  # as the user gave it, except for the hyperparameters
    num_bytes: int  # of the method

    @property
    def param(self) -> str:
        """The place of the hyperparameters in the body."""
        return SUPERVISED_PARAM if self.is_supervised else PARAM

    @property
    def grader_param(self) -> str:
        return f"{METHOD}.grader" if "grader" in self.method else f"{METHOD}.environment.args.grader"

    def most_tokens(self, context: int) -> int:
        """Most tokens of a prompt, or of a supervised job's example, where this context is served."""
        return context - 1 if self.is_supervised else (self.given.max_context or context) - self.given.max_tokens

    def hyper(self, num_items: int, tokenizer: ChatTokenizer, policy: Policy) -> Hyper:
        """Raises InvalidInput. `tokenizer`: the base model's, with its own learning rate and the context that is served."""
        rate = tokenizer.learning_rate
        hyper = resolve(self.given, num_items=num_items, base_learning_rate=rate, policy=policy)
        if self.is_supervised:
            return supervised(hyper)
        turns = 1 if self.env.name == "single_turn" else hyper.max_turns
        most = min(hyper.max_context or tokenizer.context, turns * hyper.max_tokens)
        return msgspec.structs.replace(hyper, loss=msgspec.structs.replace(hyper.loss, max_tokens=most))

    def shown(self, hyper: Hyper) -> dict[str, Any]:
        """The method for the API's answers."""
        resolved, kind = as_given(hyper, self.given), "reinforcement"
        if self.is_supervised:
            resolved, kind = {name: resolved[name] for name in SUPERVISED_NAMES if name in resolved}, "supervised"
        return {"type": kind, kind: self.method | {"hyperparameters": resolved}}


def parse(body: JobGiven) -> Submission:
    """Raises InvalidInput with the wrong name or value, and the nearest valid name."""
    if not _SUFFIX.fullmatch(body.suffix or ""):
        raise InvalidInput("suffix: use letters, digits, '.', '_' and '-'", param="suffix")
    if any(len(key) > 64 for key in body.metadata or {}):
        raise InvalidInput("metadata: a key has at most 64 characters", param="metadata")
    if body.hyperparameters and body.method:
        raise InvalidInput(
            f"hyperparameters stand in method.{cut(body.method.type)}.hyperparameters where there is a method",
            param="hyperparameters",
        )
    method = _method(body)
    if isinstance(method, SupervisedGiven):
        given = parse_hyperparameters(method.hyperparameters or {}, supervised=True)
        return Submission(body, True, EnvSpec(SUPERVISED, {}, given.chat_template_kwargs), given, {}, 0)
    num_bytes = len(JSON.encode(method.model_dump()))
    check_num_bytes("method", num_bytes, param=METHOD)
    given = parse_hyperparameters(method.hyperparameters or {})
    env = msgspec.structs.replace(_environment(method), chat_template_kwargs=given.chat_template_kwargs)
    return Submission(body, False, env, given, method.model_dump(exclude_none=True), num_bytes)


def check_num_bytes(name: str, num_bytes: int, *, param: str) -> None:
    """Raises InvalidInput for what is too large for a job's messages."""
    if num_bytes > MAX_METHOD_BYTES:
        raise InvalidInput(f"{name} has {num_bytes} bytes; at most {MAX_METHOD_BYTES}", param=param, code="too_large")


def _method(body: JobGiven) -> ReinforcementGiven | SupervisedGiven:
    method = body.method
    if method is None:
        return SupervisedGiven(hyperparameters=body.hyperparameters)
    if method.type == "dpo":
        raise InvalidInput("method 'dpo' is not offered: use 'reinforcement' or 'supervised'", param="method.type")
    if method.type not in _METHODS:
        hint = did_you_mean(method.type, _METHODS)
        raise InvalidInput(
            f"unknown method {quoted(method.type)}{hint}; use 'reinforcement' or 'supervised'", param="method.type"
        )
    given = {"reinforcement": method.reinforcement, "supervised": method.supervised, "dpo": method.dpo}
    if any(value is not None for kind, value in given.items() if kind != method.type):
        raise InvalidInput(f"method: only `{method.type}` goes with type '{method.type}'", param="method")
    if method.type == "supervised":
        return method.supervised or SupervisedGiven()
    if method.reinforcement is None:
        raise InvalidInput("method.reinforcement is missing", param="method.reinforcement")
    return method.reinforcement


def _environment(method: ReinforcementGiven) -> EnvSpec:
    if (method.grader is None) == (method.environment is None):
        raise InvalidInput(f"give {METHOD}.grader or {METHOD}.environment, one of them", param=f"{METHOD}.grader")
    if method.environment is None:
        return EnvSpec("single_turn", {"grader": method.grader})
    return EnvSpec(method.environment.name, method.environment.args)
