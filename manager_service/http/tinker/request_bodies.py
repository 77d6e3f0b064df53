"""The JSON bodies of the protocol, but for those with data or prompts, which `wire/` reads. Fields that are not named are not used."""

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request

from common.errors import InvalidInput

MAX_BYTES = 64 << 10
"""Bytes of such a body."""

T = TypeVar("T")


class SessionAsked(msgspec.Struct):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class NameGiven(msgspec.Struct):
    """A body that only names something."""

    session_id: str = ""
    model_id: str = ""
    tinker_path: str = ""
    sampling_session_id: str = ""
    request_id: str = ""


class FinishReason(msgspec.Struct, frozen=True):
    type: str = "success"


class FinishAsked(msgspec.Struct):
    reason: FinishReason = FinishReason()


class LoraAsked(msgspec.Struct):
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerAsked(msgspec.Struct, frozen=True):
    type: str = "adamw"


class CreateAsked(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraAsked | None = None
    optimizer_config: OptimizerAsked = OptimizerAsked()
    user_metadata: dict[str, Any] | None = None


class LoadAsked(msgspec.Struct):
    """A run that begins with a checkpoint (`session_id`, `model_seq_id`), or a load into a run (`model_id`, `seq_id`)."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: OptimizerAsked | None = None
    user_metadata: dict[str, Any] | None = None


class StepAsked(msgspec.Struct):
    model_id: str
    seq_id: int = 0
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveAsked(msgspec.Struct):
    """All kinds of saves."""

    model_id: str
    seq_id: int = 0
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class TtlAsked(msgspec.Struct):
    ttl_seconds: int | None


class SamplerAsked(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OwnerAsked(msgspec.Struct):
    type: str = "own"
    owner_urns: list[str] = []


class StatusAsked(msgspec.Struct):
    type: str
    reasons: list[str] | None = None  # of `client_finished`; None: any


class CursorGiven(msgspec.Struct):
    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str

    @property
    def created_at(self) -> int:
        """Seconds since 1970."""
        return int(self.last_created_at.timestamp())


class SearchAsked(msgspec.Struct):
    """A search of sessions."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: OwnerAsked = msgspec.field(default_factory=OwnerAsked)
    statuses: list[StatusAsked] | None = None
    limit: int = 50
    cursor: CursorGiven | None = None


async def read(request: Request, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
    """Raises InvalidInput."""
    body = await request.body()
    if len(body) > max_bytes:
        raise InvalidInput(f"the body has {len(body)} bytes: at most {max_bytes}", code="too_large")
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error
