"""A job's hyperparameters: names, ranges and defaults of those that users may give, and the `Hyper` that they become.

`"auto"` and null mean: the default. Unknown names are refused with the nearest valid one.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from common.errors import InvalidInput
from common.suggestions import cut, did_you_mean, quoted
from common.text.chat_template import KWARGS, TemplateKwargs
from common.wire.messages import MAX_REWARD, MAX_TOKENS, TEMPERATURE, LoraSpec, LossName, LossSpec, OptimSpec
from manager_service.records.job_records import Hyper
from manager_service.scheduling.policies import MARLAAS, MAX_ETA, Policy

PARAM, SUPERVISED_PARAM = "method.reinforcement.hyperparameters", "method.supervised.hyperparameters"
SUPERVISED_NAMES = (
    *("batch_size", "n_epochs", "learning_rate_multiplier", "max_steps", "eval_interval", "learning_rate"),
    *("lora_rank", "lora_alpha", "lora_targets", "grad_clip", "weight_decay", "keep_versions", "priority", "deadline"),
    *("plateau_steps", "plateau_delta", "max_tokens_total", KWARGS),
)
"""The hyperparameters of supervised jobs, which mean what they mean in others; `batch_size` is examples in a step."""
MAX_STEPS = 1_000_000

UNSAID = {
    "n_epochs": "1, or no limit where max_steps is given",
    "max_steps": "the steps of n_epochs",
    "learning_rate": "the base model's own",
    "learning_rate_multiplier": "1",
    "compute_multiplier": "1",
    "reasoning_effort": "default",
    "lora_targets": "all linear layers",
    "max_context": "what is served",
    "clip_low": "the loss's own",
    "clip_high": "the loss's own",
    "max_staleness": "0, or what the operator's policy lends",
    **dict.fromkeys(("deadline", "target_reward", "plateau_steps", "max_tokens_total", KWARGS), "none"),
}
"""The defaults that no value of the hyperparameter says."""

SHOWN = ("anyOf", "enum", "exclusiveMaximum", "exclusiveMinimum", "items", "maximum", "maxItems", "minimum", "type")
"""Words of a value's schema that are shown."""

SAME_IN_LOSSES = {"clip_low", "clip_high", "is_clip", "kl_coef", "mask_truncated", "temperature"}
SAME_IN_JOBS = {
    *("batch_size", "group_size", "eval_interval", "eval_samples", "temperature", "max_tokens", "max_turns"),
    *("max_context", "dynamic_sampling", "priority", "target_reward", "plateau_steps"),
    *("plateau_delta", "max_tokens_total"),
}
"""The hyperparameters that `LossSpec` and `Hyper` have under the same names."""

_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Hyperparameters(BaseModel):
    """OpenAI's names and ours. None: the default, which depends on the rest or on the base model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # OpenAI's
    batch_size: int = Field(16, ge=1, le=1024)  # groups in a step
    n_epochs: int | None = Field(None, ge=1, le=10_000)
    eval_interval: int = Field(0, ge=0, le=MAX_STEPS)  # steps; 0: only before and after training
    eval_samples: int = Field(1, ge=1, le=64)
    learning_rate_multiplier: float | None = Field(None, gt=0, le=1000, allow_inf_nan=False)
    compute_multiplier: float | None = Field(None, allow_inf_nan=False)
    reasoning_effort: str | None = None
    # ours
    group_size: int = Field(8, ge=2, le=256)
    max_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    learning_rate: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    lora_rank: int = Field(8, ge=1, le=512)
    lora_alpha: float = Field(16.0, gt=0, le=4096, allow_inf_nan=False)
    lora_targets: list[str] = Field([], max_length=64)
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=1_000_000)
    max_turns: int = Field(8, ge=1, le=64)
    max_context: int | None = Field(None, ge=2, le=10_000_000)  # tokens of a trajectory; None: what is served
    temperature: float = Field(TEMPERATURE, ge=0.01, le=10, allow_inf_nan=False)
    loss: LossName = "grpo"
    clip_low: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    clip_high: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    is_clip: float = Field(2.0, gt=0, le=1000, allow_inf_nan=False)
    kl_coef: float = Field(0.0, ge=0, le=100, allow_inf_nan=False)
    max_staleness: int | None = Field(None, ge=0, le=MAX_ETA)
    dynamic_sampling: bool = False
    mask_truncated: bool = False
    grad_clip: float = Field(1.0, gt=0, le=1e6, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    tool_timeout: float = Field(10.0, gt=0, le=300, allow_inf_nan=False)  # seconds
    keep_versions: Annotated[int, Field(ge=2, le=MAX_STEPS)] | Literal["all"] = (
        64  # of them, evenly; also the newest two and the best
    )
    priority: int = Field(0, ge=-100, le=100)  # larger first among the tenant's jobs
    deadline: float | None = Field(None, gt=0, le=366 * 86_400, allow_inf_nan=False)  # seconds after creation
    target_reward: float | None = Field(None, ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)
    plateau_steps: int | None = Field(None, ge=1, le=MAX_STEPS)  # without a new best
    plateau_delta: float = Field(0.0, ge=0, le=MAX_REWARD, allow_inf_nan=False)  # by which a new best must be better
    max_tokens_total: int | None = Field(None, ge=1, le=10**15)  # prompt, sampled and trained
    chat_template_kwargs: TemplateKwargs = {}  # values of the chat template's own variables

    @field_validator("compute_multiplier")
    @classmethod
    def _neutral_compute(cls, value: float | None) -> float | None:
        if value not in (None, 1.0):
            raise ValueError("only 1 is possible here: leave it out or use group_size")
        return value

    @field_validator("reasoning_effort")
    @classmethod
    def _neutral_effort(cls, value: str | None) -> str | None:
        if value not in (None, "default"):
            raise ValueError('only "default" is possible here: this base model has no reasoning effort')
        return value

    @field_validator("lora_targets")
    @classmethod
    def _module_names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not _MODULE.fullmatch(name) or name == "lm_head":
                raise ValueError(f"{quoted(name)} is not the name of a linear layer such as 'q_proj'")
        return value


def described(*, supervised: bool = False) -> list[dict[str, Any]]:
    """Name, default, what that is in words, and JSON Schema of each."""
    rows = Hyperparameters.model_json_schema()["properties"]
    return [
        {
            "id": name,
            "default": row.get("default"),
            "default_text": UNSAID.get(name) or json.dumps(row["default"]).strip('"'),
            "schema_": {key: row[key] for key in row if key in SHOWN},
        }
        for name, row in rows.items()
        if not supervised or name in SUPERVISED_NAMES
    ]


def parse_hyperparameters(given: Mapping[str, Any], *, supervised: bool = False) -> Hyperparameters:
    """Raises InvalidInput naming the parameter."""
    param, names = (SUPERVISED_PARAM, SUPERVISED_NAMES) if supervised else (PARAM, tuple(Hyperparameters.model_fields))
    for name in given:
        if name not in names:
            of = " of a supervised job" if supervised else ""
            raise InvalidInput(
                f"unknown hyperparameter {quoted(name)}{of}{did_you_mean(name, names)}", param=f"{param}.{cut(name)}"
            )
    plain = {name: value for name, value in given.items() if value is not None and value != "auto"}
    try:
        parsed = Hyperparameters.model_validate(plain)
    except ValidationError as error:
        raise _translated(error, param) from error
    if parsed.learning_rate is not None and parsed.learning_rate_multiplier is not None:
        raise InvalidInput(
            "give learning_rate or learning_rate_multiplier, not both", param=f"{param}.learning_rate_multiplier"
        )
    return parsed


def _translated(error: ValidationError, param: str) -> InvalidInput:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part != "constrained-int")  # pydantic's own name, in a union
    reason = first["msg"].removeprefix("Value error, ")
    value = "" if first["type"] == "value_error" else f", not {quoted(first['input'])}"
    return InvalidInput(f"{name}: {reason[0].lower()}{reason[1:]}{value}", param=f"{param}.{name}")


def resolve(given: Hyperparameters, *, num_items: int, base_learning_rate: float, policy: Policy = MARLAAS) -> Hyper:
    """Fills in all defaults. `num_items` 0: the environment makes its own. Raises InvalidInput."""
    rate = given.learning_rate or base_learning_rate * (given.learning_rate_multiplier or 1.0)
    same: dict[str, Any] = given.model_dump(include=SAME_IN_JOBS)
    return Hyper(
        num_steps=num_steps(given, num_items),
        lora=LoraSpec(given.lora_rank, given.lora_alpha, tuple(given.lora_targets)),
        loss=LossSpec(name=given.loss, **given.model_dump(include=SAME_IN_LOSSES)),
        optim=OptimSpec(learning_rate=rate, weight_decay=given.weight_decay, grad_clip=given.grad_clip),
        max_staleness=policy.max_staleness(given.max_staleness),
        tool_timeout_s=given.tool_timeout,
        deadline_s=given.deadline,
        keep_versions=None if given.keep_versions == "all" else given.keep_versions,
        **same,
    )


def supervised(hyper: Hyper) -> Hyper:
    """The same of a supervised job: a group is an example, and nothing is sampled. Rows of the next step are made during one."""
    loss = LossSpec(name="cross_entropy")
    return msgspec.structs.replace(hyper, group_size=1, loss=loss, max_tokens=1, max_turns=1, max_staleness=1)


def num_steps(given: Hyperparameters, num_items: int) -> int:
    """The smaller of `max_steps` and the steps of `n_epochs`; one epoch if neither is given. Raises InvalidInput."""
    if num_items == 0:
        if given.max_steps is None:
            raise InvalidInput("without a training_file, max_steps says when training ends", param=f"{PARAM}.max_steps")
        if given.n_epochs is not None:
            raise InvalidInput("n_epochs needs a training_file; use max_steps", param=f"{PARAM}.n_epochs")
        return given.max_steps
    if given.n_epochs is None and given.max_steps is not None:
        return given.max_steps
    steps = math.ceil((given.n_epochs or 1) * num_items / given.batch_size)
    return min(steps, given.max_steps or steps)


def as_given(hyper: Hyper, given: Hyperparameters) -> dict[str, Any]:
    """The resolved hyperparameters under the names that users give them."""
    resolved = given.model_dump(
        exclude={"n_epochs", "learning_rate_multiplier", "compute_multiplier", "reasoning_effort"}
    )
    optional = {"n_epochs": given.n_epochs, "learning_rate_multiplier": given.learning_rate_multiplier}
    return {
        **resolved,
        **{name: value for name, value in optional.items() if value is not None},
        "max_steps": hyper.num_steps,
        "learning_rate": hyper.optim.learning_rate,
        "max_staleness": hyper.max_staleness,
    }
