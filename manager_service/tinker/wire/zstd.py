"""Unpacks compressed bodies, up to a limit on what comes out."""

import zstandard

from common.errors import InvalidInput


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
