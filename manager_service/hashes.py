"""Reads jobs, runs and counters from the hashes that hold them in Redis."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog

from manager_service.records import USAGE_COUNTERS

S = TypeVar("S")
T = TypeVar("T")
log = structlog.get_logger()


def usage_fields(job: str) -> list[str]:
    """The fields of `usage:<tenant>` with a job's counters."""
    return [f"{job}/{counter}" for counter in USAGE_COUNTERS]


def usage_of(amounts: Sequence[bytes | None]) -> dict[str, float]:
    """Counter -> amount, for the values of `usage_fields` that are there."""
    found = zip(USAGE_COUNTERS, amounts, strict=True)
    return {name: float(amount) for name, amount in found if amount is not None}


def read_record(key: str, record: Mapping[bytes, bytes], spec: type[S], state: type[T]) -> tuple[S, T] | None:
    """The `spec` and `state` of a job's or run's hash; None, with a line in the log, if they cannot be read."""
    try:
        return msgspec.json.decode(record[b"spec"], type=spec), msgspec.json.decode(record[b"state"], type=state)
    except (KeyError, msgspec.MsgspecError) as error:
        log.error("record_unreadable", key=key, reason=str(error))
        return None
