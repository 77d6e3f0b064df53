"""Graders as data: checks the shapes that users give. The env service runs them.

string_check, text_similarity, python, multi     as in OpenAI's reinforcement fine-tuning
score_model, label_model                         as there; a model of this service answers, or one at `url`, which is ours
math, endpoint                                   ours
"""

import string
import types
import warnings
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.errors import InvalidInput
from common.outgoing import check_url
from common.suggestions import cut, did_you_mean, quoted
from common.tasks import formula, templates
from common.text.chat_template import TemplateKwargs
from common.wire.messages import MAX_REWARD, AdapterRef

T = TypeVar("T", bound=BaseModel)

MAX_SOURCE_CHARACTERS = 256 * 1024

Metric = Literal["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]
REFUSED_METRICS = ("cosine", "meteor")
MAX_GRADER_TOKENS = 1024
"""Most tokens that a grader's model may answer with; 64 unless told."""


class Declared(BaseModel):
    """A shape that a user declares. Unknown fields are refused, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _template(text: str) -> str:
    try:
        templates.variables(text)
    except InvalidInput as error:
        raise ValueError(str(error)) from error
    return text


class StringCheck(Declared):
    """Gives 1 if the comparison holds, else 0."""

    type: Literal["string_check"]
    name: str = ""
    input: str
    reference: str
    operation: Literal["eq", "ne", "like", "ilike"]
    """`like`: the input contains the reference; `ilike`: the same, whatever the case."""

    _templates = field_validator("input", "reference")(_template)


class TextSimilarity(Declared):
    """The likeness of two texts, from 0 to 1."""

    type: Literal["text_similarity"]
    name: str = ""
    input: str
    reference: str
    evaluation_metric: Metric
    pass_threshold: float | None = Field(None, allow_inf_nan=False)
    """Reported as the part `passed`; the reward is the similarity itself."""

    _templates = field_validator("input", "reference")(_template)

    @field_validator("evaluation_metric", mode="before")
    @classmethod
    def _without_downloads(cls, value: Any) -> Any:
        if value in REFUSED_METRICS:
            known = ", ".join(get_args(Metric))
            raise ValueError(f"{value} needs a download, which this service does not make; use one of {known}")
        return value


class PythonGrader(Declared):
    """`source` defines `grade(sample, item)`, which returns a finite number. Runs in the sandbox."""

    type: Literal["python"]
    name: str = ""
    source: str = Field(max_length=MAX_SOURCE_CHARACTERS)


class MathGrader(Declared):
    r"""Gives 1 if the final answers are mathematically equal, else 0. The final answer is what the last marker names, such as
    `\boxed{}` or `####`."""

    type: Literal["math"]
    name: str = ""
    input: str = "{{sample.output_text}}"
    reference: str = "{{item.answer}}"
    fallback: bool = True
    """Without a marker, the last number of the last sentence is the final answer; False: there is none."""

    _templates = field_validator("input", "reference")(_template)


class EndpointGrader(Declared):
    """Sends `{"item", "sample"}` by POST to the user's own URL, which answers `{"reward": number}`."""

    type: Literal["endpoint"]
    name: str = ""
    url: str
    headers: dict[str, str] = {}
    pass_threshold: float | None = Field(None, allow_inf_nan=False)

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        check_url(url)
        return url

    @field_validator("headers")
    @classmethod
    def _are_plain(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER_NAME.issuperset(name) or not name or name.lower() in _OWN_HEADERS:
                raise ValueError(f"header {quoted(name)} cannot be set")
            if not value.isascii() or not value.isprintable():
                raise ValueError(f"header {quoted(name)}: its value must be printable ASCII")
        return headers


_HEADER_NAME = frozenset(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
_OWN_HEADERS = ("host", "content-length", "content-type", "transfer-encoding", "connection")


class TextPart(Declared):
    type: Literal["input_text", "output_text", "text"]
    text: str


class GraderMessage(Declared):
    """A message to a grader's model; its text is a template."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | TextPart | list[TextPart]
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = [self.content] if isinstance(self.content, TextPart) else self.content
        return "".join(part.text for part in parts)

    @model_validator(mode="after")
    def _is_a_template(self) -> "GraderMessage":
        _template(self.text)
        return self


class SamplingParams(Declared):
    max_completions_tokens: int | None = Field(None, ge=1, le=MAX_GRADER_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    """0 unless told: the likeliest answer."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    """The seed of a model at `url`. One of this service draws by the job's seed."""


class ModelGrader(Declared):
    """A model is asked about the answer: a base or tuned one, `ft:…`, of this service, or with a `url` one behind an API
    like OpenAI's (`https://api.example.org/v1`), at a host that the operator allows."""

    name: str = ""
    model: str = Field(min_length=1, max_length=512)
    input: tuple[GraderMessage, ...] = Field(strict=False, min_length=1, max_length=64)
    sampling_params: SamplingParams = Field(default_factory=lambda: SamplingParams.model_validate({}))
    chat_template_kwargs: TemplateKwargs | None = None
    """Values of its chat template's own variables; a model at `url` is sent them."""
    url: str | None = None

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
            if "?" in url or "#" in url:
                raise ValueError("must have no query and no fragment")
        return url

    @model_validator(mode="after")
    def _seeds_elsewhere(self) -> "ModelGrader":
        if self.url is None and self.sampling_params.seed is not None:
            raise ValueError("sampling_params.seed: a model of this service draws by the job's seed; leave it out")
        return self


class ScoreModel(ModelGrader):
    """The reward is the number with which the model answers: alone, or the `result` of a JSON object."""

    type: Literal["score_model"]
    range: tuple[float, float] = Field((0.0, 1.0), strict=False)
    """An answer outside fails."""
    pass_threshold: float | None = Field(None, allow_inf_nan=False)

    @field_validator("range")
    @classmethod
    def _is_a_range(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if not -MAX_REWARD <= ends[0] < ends[1] <= MAX_REWARD:
            raise ValueError(f"must be two numbers, the smaller first, of at most {MAX_REWARD:.0e} in size")
        return ends


class LabelModel(ModelGrader):
    """Gives 1 if the model answers with a passing label, 0 with another: plain, or `result` of a JSON object."""

    type: Literal["label_model"]
    labels: tuple[str, ...] = Field(strict=False, min_length=1, max_length=64)
    passing_labels: tuple[str, ...] = Field(strict=False, min_length=1, max_length=64)

    @model_validator(mode="after")
    def _are_labels(self) -> "LabelModel":
        odd = any(not label or label != label.strip() for label in self.labels)
        if odd or len(set(self.labels)) < len(self.labels):
            raise ValueError("labels must be different texts, without white space around them")
        for label in self.passing_labels:
            if label not in self.labels:
                raise ValueError(
                    f"passing_labels: {quoted(label)} is not among the labels{did_you_mean(label, self.labels)}"
                )
        return self


AnyModelGrader = ScoreModel | LabelModel
SingleGrader = StringCheck | TextSimilarity | PythonGrader | MathGrader | EndpointGrader | ScoreModel | LabelModel
_Single = Annotated[SingleGrader, Field(discriminator="type")]


class MultiGrader(Declared):
    """A formula over the rewards of named graders."""

    type: Literal["multi"]
    name: str = ""
    graders: dict[str, _Single] = Field(min_length=1, max_length=20)
    calculate_output: str

    @model_validator(mode="after")
    def _names_are_known(self) -> "MultiGrader":
        for name in self.graders:
            if not name.isidentifier():
                raise ValueError(f"the grader name {quoted(name)} cannot stand in a formula: use letters, digits and _")
        try:
            used = formula.names_of(self.calculate_output)
        except InvalidInput as error:
            raise ValueError(f"calculate_output: {error}") from error
        for name in sorted(used - set(self.graders)):
            raise ValueError(
                f"calculate_output names {quoted(name)}, which is no grader{did_you_mean(name, self.graders)}"
            )
        return self


Grader = SingleGrader | MultiGrader

GRADERS: dict[str, type[Declared]] = {
    "string_check": StringCheck,
    "text_similarity": TextSimilarity,
    "python": PythonGrader,
    "multi": MultiGrader,
    "math": MathGrader,
    "endpoint": EndpointGrader,
    "score_model": ScoreModel,
    "label_model": LabelModel,
}

MODEL_GRADERS = ("score_model", "label_model")


def validate_grader(grader: Mapping[str, Any], *, param: str = "grader") -> Grader:
    """The grader as a model. Raises InvalidInput naming the field, and the nearest valid name for an unknown one."""
    kind = grader.get("type")
    _check_type(kind, f"{param}.type")
    for name, part in _sub_graders(grader):
        _check_type(part.get("type"), f"{param}.graders.{cut(name)}.type")
    model: Any = parse(GRADERS[str(kind)], grader, param=param)
    return model


def check_sources(grader: Grader, *, param: str = "grader") -> None:
    """Raises InvalidInput about source of Python that does not compile, with its line, or that defines no `grade`."""
    parts = grader.graders if isinstance(grader, MultiGrader) else {"": grader}
    for name, part in parts.items():
        if isinstance(part, PythonGrader) and (fault := _fault_of(part.source)):
            where = f"{param}.graders.{name}.source" if name else f"{param}.source"
            raise InvalidInput(f"{where}: {fault}", param=where)


def _fault_of(source: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # such as an odd escape, of which nobody here would hear
            code = compile(source, "<source>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it does not compile: {str(error) or 'it is nested too deeply'}"
    return "" if "grade" in code.co_names else "the source must define grade(sample, item)"


def item_fields(grader: Grader) -> set[str]:
    """The fields of an item that the grader's templates name, such as `answer` or `meta.answer`."""
    parts = grader.graders.values() if isinstance(grader, MultiGrader) else (grader,)
    names = [name for part in parts for text in _templates_of(part) for name in templates.variables(text)]
    return {name.removeprefix("item.") for name in names if name.startswith("item.")}


def _templates_of(grader: SingleGrader) -> list[str]:
    if isinstance(grader, ModelGrader):
        return [message.text for message in grader.input]
    return [getattr(grader, "input", ""), getattr(grader, "reference", "")]


def model_graders(grader: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(place in the grader, such as `graders.style`, or ""; grader) of those that ask a model of this service."""
    parts = [(f"graders.{name}", part) for name, part in _sub_graders(grader)] or [("", grader)]
    return [(place, part) for place, part in parts if part.get("type") in MODEL_GRADERS and part.get("url") is None]


def tuned_version(model: str) -> AdapterRef | None:
    """The version that `ft:{base}:{tenant}:{suffix}:{job}@{version}` names; None for another name."""
    name, _, version = model.partition("@")
    parts = name.split(":")
    if len(parts) != 5 or parts[0] != "ft" or not version.isdecimal():
        return None
    return AdapterRef(parts[2], parts[4], int(version))


def outside_urls(grader: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(place in a valid grader, as for `model_graders`; type; URL) of those that call a host."""
    parts = [(f"graders.{name}", part) for name, part in _sub_graders(grader)] or [("", grader)]
    return [(place, str(part["type"]), str(part["url"])) for place, part in parts if part.get("url") is not None]


def check_item(grader: Grader, item: Mapping[str, Any], *, param: str = "grader") -> None:
    """Raises InvalidInput if a template names a field that this item does not have."""
    check_fields(item_fields(grader), item, param=param)


def check_fields(fields: Collection[str], item: Mapping[str, Any], *, param: str = "grader") -> None:
    """Raises InvalidInput about the first field that the item lacks; `fields` as from `item_fields`."""
    for field in sorted(fields):
        try:
            templates.lookup(f"item.{field}", item, {})
        except InvalidInput as error:
            raise InvalidInput(f"{error}{did_you_mean(field, [str(key) for key in item])}", param=param) from error


def _check_type(kind: Any, param: str) -> None:
    if isinstance(kind, str) and kind in GRADERS:
        return
    known = ", ".join(GRADERS)
    raise InvalidInput(
        f"unknown grader type {quoted(kind)}{did_you_mean(str(kind), GRADERS)}; known: {known}", param=param
    )


def _sub_graders(grader: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, grader) of each grader in a `multi`."""
    parts: Any = grader.get("graders")
    if grader.get("type") != "multi" or not isinstance(parts, Mapping):
        return []
    named = cast(Mapping[str, Any], parts)
    return [(name, part) for name, part in named.items() if isinstance(part, Mapping)]


# ------------------------------------------------------------------------------- shared with environments.py


def parse(model: type[T], value: Mapping[str, Any], *, param: str) -> T:
    """Makes a `model` of `value`. Raises InvalidInput about the first thing that is wrong."""
    unknown = next((name for name in value if name not in model.model_fields), None)
    if unknown is not None and issubclass(model, Declared):
        raise _unknown([unknown], model, param)
    try:
        return model.model_validate(dict(value))
    except ValidationError as error:
        raise _translate(error, model, param) from error


def _translate(error: ValidationError, model: type[BaseModel], param: str) -> InvalidInput:
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    path = [str(key) for key in first["loc"]]
    if "graders" in path:
        path = [key for i, key in enumerate(path) if not (i == path.index("graders") + 2 and key in GRADERS)]
    if first["type"] == "extra_forbidden":
        return _unknown(path, model, param)
    where = ".".join([param, *map(cut, path)])
    if first["type"] == "missing":
        return InvalidInput(f"{where} is missing", param=where)
    return InvalidInput(f"{where}: {first['msg'].removeprefix('Value error, ')}", param=where)


def _unknown(path: list[str], model: type[BaseModel], param: str) -> InvalidInput:
    place, hint = ".".join([param, *map(cut, path[:-1])]), did_you_mean(path[-1], _field_names(model))
    return InvalidInput(f"unknown field {quoted(path[-1])} in {place}{hint}", param=f"{place}.{cut(path[-1])}")


def _field_names(model: type[BaseModel]) -> set[str]:
    """Names of the fields of a model and of the models in it, to suggest from."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        names |= {name}.union(*(_field_names(part) for part in _models_in(field.annotation)))
    return names


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (None, Literal):
        return []
    if get_origin(annotation) in (Union, types.UnionType, Annotated, dict, list, tuple):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []
