"""The protocol's JSON bodies; `wire/` reads those with data or prompts. Fields that are not named are not used."""

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request

from common.errors import InvalidInput
from manager_service.http.reading.json_values import decode_body

MAX_BYTES = 8 << 10
"""Bytes of such a body, and so of what a session or a run tells of itself."""

T = TypeVar("T")


class SessionBody(msgspec.Struct):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class NameBody(msgspec.Struct):
    """A body that only names something."""

    session_id: str = ""
    model_id: str = ""
    tinker_path: str = ""
    sampling_session_id: str = ""
    request_id: str = ""


class FinishReason(msgspec.Struct, frozen=True):
    type: str = "success"


class FinishBody(msgspec.Struct):
    reason: FinishReason = FinishReason()


class LoraBody(msgspec.Struct):
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(msgspec.Struct, frozen=True):
    type: str = "adamw"


class CreateBody(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: dict[str, Any] | None = None


class LoadBody(msgspec.Struct):
    """A run from a checkpoint (`session_id`, `model_seq_id`), or a load into a run (`model_id`, `seq_id`)."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None


class StepBody(msgspec.Struct):
    model_id: str
    seq_id: int = 0
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(msgspec.Struct):
    """All kinds of saves."""

    model_id: str
    seq_id: int = 0
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class TtlBody(msgspec.Struct):
    ttl_seconds: int | None


class SamplerBody(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OwnerBody(msgspec.Struct):
    type: str = "own"
    owner_urns: list[str] = []


class StatusBody(msgspec.Struct):
    type: str
    reasons: list[str] | None = None  # of `client_finished`; None: any


class CursorBody(msgspec.Struct):
    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str

    @property
    def created_at(self) -> int:
        """Seconds since 1970."""
        return int(self.last_created_at.timestamp())


class SearchBody(msgspec.Struct):
    """A search of sessions."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: OwnerBody = msgspec.field(default_factory=OwnerBody)
    statuses: list[StatusBody] | None = None
    limit: int = 50
    cursor: CursorBody | None = None


async def read(request: Request, kind: type[T]) -> T:
    """Raises InvalidInput."""
    body = await request.body()
    if len(body) > MAX_BYTES:
        raise InvalidInput(
            f"the body has {len(body)} bytes, of at most {MAX_BYTES}: keep what is longer yourself", code="too_large"
        )
    return decode_body(body, kind)
