"""One helper process: `python -m manager_service.api.reading.process {"tiny": "/folder"}`.

reads: tasks from standard input   writes: answers to standard output   holds: the tokenizers
waits for: a task   unblocked by: the manager; ends when standard input does, as it does when the manager dies
"""

import os
import signal
import sys
from collections.abc import Mapping
from typing import BinaryIO

import msgspec

from common.errors import InvalidInput
from common.text.tokens import ChatTokenizer
from manager_service.api.reading.tasks import Done, Refused, Task, do

LENGTH_BYTES = 8
"""Before each task and each answer stands its length."""
NICENESS = 5
"""The manager's own loops come first where cores are busy."""


def serve(folders: Mapping[str, str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers tasks until the source ends. `folders`: of the base models."""
    tokenizers = {name: ChatTokenizer.load(folder) for name, folder in folders.items()}
    decoder = msgspec.msgpack.Decoder(Task)
    while length := source.read(LENGTH_BYTES):
        answer = _answer(decoder.decode(source.read(int.from_bytes(length))), tokenizers)
        encoded = msgspec.msgpack.encode(answer)
        sink.write(len(encoded).to_bytes(LENGTH_BYTES) + encoded)
        sink.flush()


def _answer(task: Task, tokenizers: Mapping[str, ChatTokenizer]) -> Done | Refused:
    try:
        return Done(do(task, tokenizers))
    except InvalidInput as error:
        return Refused(str(error), error.param, error.code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the manager, whose end is this one's
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        serve(msgspec.json.decode(sys.argv[1], type=dict[str, str]), sys.stdin.buffer, answers)
