"""Unpacks compressed bodies, up to a limit on what comes out."""

import zstandard

from common.errors import InvalidInput

SLICE_BYTES = 1 << 16


def unpack(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """A body without its Content-Encoding. Raises InvalidInput."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidInput(f"Content-Encoding {encoding!r} is not known here: use zstd or none")
    unpacked = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=max_bytes).stream_reader(body) as reader:
            while part := reader.read(SLICE_BYTES):
                unpacked += part
                if len(unpacked) > max_bytes:
                    raise InvalidInput(
                        f"the body has more than {max_bytes} bytes when it is unpacked", code="too_large"
                    )
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is not zstd: {error}") from error
    return bytes(unpacked)
