"""A helper process that answers as a question says: `python -m tests.support.answering_helper [SECONDS]`, of its processor, for one.
It imports little."""

import os
import sys
import time

from common.children.helpers import address_space, serve
from common.errors import InvalidInput


def answer(question: bytes) -> bytes | int:
    match question:
        case b"die":
            os._exit(1)
        case b"hang":
            while True:
                pass
        case b"sleep":
            time.sleep(0.5)
            return b"awake"
        case b"fill":
            return len(bytearray(1 << 30))
        case b"pid":
            return os.getpid()
        case b"refuse":
            raise InvalidInput("no", param="question", code="refused")
        case _:
            print("a library prints this")
            return question * 2


if __name__ == "__main__":
    memory_bytes = address_space() + (256 << 20) if sys.platform == "linux" else None
    serve(answer, memory_bytes=memory_bytes, processor_s=float(sys.argv[1]) if sys.argv[1:] else 0.0)
