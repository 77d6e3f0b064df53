"""Packs the env service's memory of a trajectory between turns, which travels in `TurnRequest.context`."""

from typing import Any, cast

import msgpack
import msgspec

from common.errors import CorruptObject
from common.wire.messages import EnvSpec
from env_service.failures import EnvironmentFailed

MAX_STATE_BYTES = 64 * 1024


class Context(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """It begins with what stays the same from turn to turn, which is sent once."""

    weight: float = 1.0  # the tenant's
    env: EnvSpec
    item: dict[str, Any]
    num_prompt: int  # tokens before the first model turn
    max_turns: int
    tool_timeout_s: float
    state: bytes  # the environment's own, msgpack
    reward: float | None = None  # sum of the steps so far that gave one
    reward_parts: dict[str, float] = {}


class _Weighed(msgspec.Struct, array_like=True):
    """The beginning of every context, also of that of a request to a grader's model."""

    weight: float = 1.0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Context)
_weighed = msgspec.msgpack.Decoder(_Weighed)


def encode_context(context: Context) -> bytes:
    return _encoder.encode(context)


def decode_context(data: bytes) -> Context:
    """Raises CorruptObject."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptObject(f"the trajectory's context cannot be read: {error}") from error


def weight_in(data: bytes) -> float:
    """The tenant's weight, of a packed context; 1 if it cannot be read."""
    try:
        return _weighed.decode(data).weight
    except (msgspec.DecodeError, ValueError):
        return 1.0


def encode_state(state: Any) -> bytes:
    """Raises EnvironmentFailed if an environment's state is not msgpack-able or too large."""
    try:
        data = cast(bytes, msgpack.packb(state))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFailed(f"the environment's state cannot be packed: {error}") from error
    if len(data) > MAX_STATE_BYTES:
        raise EnvironmentFailed(f"the environment's state has {len(data)} bytes, more than {MAX_STATE_BYTES}")
    return data


def decode_state(data: bytes) -> Any:
    """Reads plain values only. Raises CorruptObject, also for a length beyond the bytes there."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (msgpack.UnpackException, ValueError) as error:
        raise CorruptObject(f"the environment's state cannot be read: {error}") from error
