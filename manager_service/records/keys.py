"""Names of the records outside the cells, and how records are read."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import structlog

S = TypeVar("S")
T = TypeVar("T")
log = structlog.get_logger()
GLOBAL = "marlaas:{@}:"
"""Prefix of the records outside the cells, all on one shard. No base model can have this name."""


def read_record(key: str, record: Mapping[bytes, bytes], spec: type[S], state: type[T]) -> tuple[S, T] | None:
    """The `spec` and `state` of a job's or run's hash; None, with a line in the log, if unreadable."""
    try:
        return msgspec.json.decode(record[b"spec"], type=spec), msgspec.json.decode(record[b"state"], type=state)
    except (KeyError, msgspec.MsgspecError) as error:
        log.error("record_unreadable", key=key, reason=str(error))
        return None


JSON = msgspec.json.Encoder()
