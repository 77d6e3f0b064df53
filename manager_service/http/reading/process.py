"""One helper process: `python -m manager_service.http.reading.process {"tiny": ["/folder", 2048]} [imports]`.

reads: tasks from standard input   writes: answers to standard output   holds: the tokenizers
waits for: a task   unblocked by: the manager; ends when standard input does, as it does when the manager dies
"""

import os
import sys
from collections.abc import Mapping

import msgspec

from common.children.helpers import address_space, serve
from common.text.tokens import ChatTokenizer
from manager_service.http.reading.tasks import Task, do

NICENESS = 5
"""The manager's own loops come first where cores are busy."""
TASK_S = 20.0
"""The most processor seconds of one task: on a busy machine they last longer, which is no fault of its sender."""
IMPORTS = "imports"
ROOM_BYTES = 1 << 30
"""Address space that tasks may take beyond what the process has at its start: small bodies may unpack to much."""


def main(bases: Mapping[str, tuple[str, int]], *, imports: bool = False) -> None:
    """Answers tasks until the manager goes. `bases`: the folder and the served context of each. `imports`: also what imports packages
    of the operator's, which may need any room."""
    os.nice(NICENESS)
    tokenizers = {name: ChatTokenizer.load(folder, context) for name, (folder, context) in bases.items()}
    decoder = msgspec.msgpack.Decoder(Task)
    serve(
        lambda task: do(decoder.decode(task), tokenizers),
        memory_bytes=None if imports else address_space() + ROOM_BYTES,
        processor_s=0.0 if imports else TASK_S,
    )


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=dict[str, tuple[str, int]]), imports=sys.argv[2:] == [IMPORTS])
