"""The graders that are models: what the model is asked, and what its answer means.

A model of this service answers by a turn of its own (see `env_service/graders/judging.py`): the grader says what to ask by raising
ModelAsked, and finds the answer when it is run again. One elsewhere is asked by `ModelEndpoints`, which waits for its answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from common import templates
from common.errors import InvalidInput
from common.graders import AnyModelGrader, LabelModel, ScoreModel
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt

MAX_TOKENS = 64

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None


class ModelAsked(Exception):
    """No failure: the grading goes on once a model of this service has answered."""

    def __init__(self, grader: str, question: ModelQuestion) -> None:
        """`grader`: its name in a `multi`, "" for one alone."""
        super().__init__(f"{question.model} is asked")
        self.grader = grader
        self.question = question


def question_of(grader: AnyModelGrader, attempt: Attempt) -> ModelQuestion:
    """Raises InvalidInput, naming the variable, if a template cannot be filled, or for a question that is too long."""
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
