"""Takes bodies from their bytes to what is checked. Called in a helper process if a body is large."""

import msgspec
import zstandard
from google.protobuf.message import DecodeError

from common.errors import InvalidInput
from manager_service.http.tinker.wire import protobuf
from manager_service.http.tinker.wire import tinker_pb2 as pb
from manager_service.http.tinker.wire.learning import CheckedPass, check_pass

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
    try:
        return check_pass(pb.ForwardBackwardRequest.FromString(unpacked))
    except DecodeError as error:
        raise InvalidInput(f"the body is no ForwardBackwardRequest: {error}") from error


def _too_old(body: bytes) -> CheckedPass:
    """Keeps the number, so that the operations behind it do not wait for it."""
    try:
        given = msgspec.json.decode(body, type=PassNumber)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error
    return CheckedPass(given.model_id, given.seq_id, forward_only=False, fault=TOO_OLD)


def unpack(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """A body without its Content-Encoding. Raises InvalidInput."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidInput(f"Content-Encoding {encoding!r} is not known here: use zstd or none")
    try:
        announced = zstandard.frame_content_size(body)  # -1: not announced; then max_output_size holds
        if announced > max_bytes:
            raise InvalidInput(f"the body has {announced} bytes unpacked: at most {max_bytes}", code="too_large")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is no zstd frame of at most {max_bytes} bytes unpacked: {error}") from error
