"""Takes bodies from their bytes to what is checked. Called in a helper process if a body is large."""

import msgspec

from common.errors import InvalidInput
from manager_service.tinker.wire import protobuf
from manager_service.tinker.wire.learning import CheckedPass, check_pass
from manager_service.tinker.wire.zstd import unpack

JSON_TYPE = "application/json"
TOO_OLD = "this client sends data as JSON, which this service does not read: install tinker 0.24.1 or newer"


class PassNumber(msgspec.Struct):
    """The number of a pass over data that an older client sends as JSON."""

    model_id: str
    seq_id: int = 0


def read_pass(body: bytes, *, content_type: str, encoding: str, max_bytes: int) -> CheckedPass:
    """A pass over data. Raises InvalidInput for a body that cannot be read; what is wrong in one that can is in `fault`."""
    unpacked = unpack(body, encoding, max_bytes=max_bytes)
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        return _too_old(unpacked)
    if kind != protobuf.CONTENT_TYPE:
        raise InvalidInput(f"Content-Type {kind!r} is not known here: use {protobuf.CONTENT_TYPE}")
    return check_pass(protobuf.read_pass(unpacked))


def _too_old(body: bytes) -> CheckedPass:
    """Keeps the number, so that the operations behind it do not wait for it."""
    try:
        given = msgspec.json.decode(body, type=PassNumber)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error
    return CheckedPass(given.model_id, given.seq_id, forward_only=False, fault=TOO_OLD)
