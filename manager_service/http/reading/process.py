"""One helper process: `python -m manager_service.http.reading.process {"tiny": ["/folder", 2048]}`.

reads: tasks from standard input   writes: answers to standard output   holds: the tokenizers
waits for: a task   unblocked by: the manager; ends when standard input does, as it does when the manager dies
"""

import os
import sys
from collections.abc import Mapping

import msgspec

from common.children.helpers import serve
from common.text.tokens import ChatTokenizer
from manager_service.http.reading.tasks import Task, do

NICENESS = 5
"""The manager's own loops come first where cores are busy."""


def main(bases: Mapping[str, tuple[str, int]]) -> None:
    """Answers tasks until the manager goes. `bases`: the folder and the served context of each."""
    os.nice(NICENESS)
    tokenizers = {name: ChatTokenizer.load(folder, context) for name, (folder, context) in bases.items()}
    decoder = msgspec.msgpack.Decoder(Task)
    serve(lambda task: do(decoder.decode(task), tokenizers))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=dict[str, tuple[str, int]]))
