"""Takes bodies from their bytes to what is checked. Called in a helper process if a body is large."""

from common.errors import InvalidInput
from manager_service.tinker.wire import plain, protobuf
from manager_service.tinker.wire.learning import CheckedPass, check_pass
from manager_service.tinker.wire.zstd import unpack


def read_pass(body: bytes, *, content_type: str, encoding: str, max_bytes: int) -> CheckedPass:
    """A pass over data. Raises InvalidInput for a body that cannot be read; what is wrong in one that can is in `fault`."""
    unpacked = unpack(body, encoding, max_bytes=max_bytes)
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (protobuf.CONTENT_TYPE, plain.CONTENT_TYPE):
        raise InvalidInput(f"Content-Type {kind!r} is not known here: use {protobuf.CONTENT_TYPE} or JSON")
    return check_pass((protobuf if kind == protobuf.CONTENT_TYPE else plain).read_pass(unpacked))
