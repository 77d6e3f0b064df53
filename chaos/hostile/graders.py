"""Grader calls of the hostile tenant by `graders/run`: each is refused, or runs and gives no reward.

A `python` grader here gives a reward if it got what no grader may have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ESCAPE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for attempt in (lambda: libc.prctl(1, 0, 0, 0, 0), os.setsid, lambda: os.setpgid(0, 0)):
    try: attempt()
    except OSError: pass
def grade(sample, item):
    while True: time.sleep(1)
"""
TRY = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
other = os.getppid() or 1
def fill():
    for number in range(100_000): os.mkdir(str(number))
    return True
def grade(sample, item):
    try: return float({gets})
    except OSError: return 0.0
"""
GETS = {
    "a file in memory": "os.memfd_create('x') >= 0",
    "shared memory": "libc.shmget(0, 2 ** 26, 0o1600) >= 0",
    "folders without end": "fill()",
    "limits of others": "resource.prlimit(other, resource.RLIMIT_NOFILE) is not None",
    "the signal of a file": "libc.fcntl(0, 10, 9) >= 0",
    "the owner of a file": "libc.fcntl(0, 8, other) >= 0",
    "a session": "os.setsid() is None",
    "another process": "os.fork() >= 0",
}
OUTPUT, LONG_FIELD = "{{sample.output_text}}", "{{item.a}}"
URLS = (
    "http://[::1", "http://a:99999/", "http://user:secret@a/", "http://a..b/", "http://xn--/", "http://[fe80::1%eth0]/",
    "http://999.1.1.1/", "http://a b/", "http://\ud800/", "http://a/" + "x" * 3000, "file:///etc/passwd", "",
)  # fmt: skip
OWN_URLS = ("http://127.0.0.1:6379/", "http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.1]:6379/")
"""Addresses of what only the operator may reach."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A call of `graders/run`."""

    name: str
    grader: Mapping[str, Any]
    sample: str = "x"
    item: Mapping[str, Any] | None = None
    answers: Sequence[int] = (200,)
    """Statuses of which one is right; with 200 the reward must be 0."""

    @property
    def body(self) -> dict[str, Any]:
        return {"grader": self.grader, "model_sample": self.sample, "item": self.item or {"answer": "3"}}

    def is_right(self, status: int, reward: float | None) -> bool:
        return status in self.answers and (status != 200 or reward == 0)


def code(source: str) -> dict[str, Any]:
    return {"type": "python", "name": "hostile", "source": source}


def compared(text: str, reference: str, **kind: str) -> dict[str, Any]:
    return {"type": "string_check", "operation": "eq", "name": "hostile", "input": text, "reference": reference, **kind}


def _math(reference: str) -> dict[str, Any]:
    return {"type": "math", "name": "hostile", "input": OUTPUT, "reference": reference}


def _rouge(text: str, reference: str) -> dict[str, Any]:
    kind = {"type": "text_similarity", "evaluation_metric": "rouge_l"}
    return {"name": "hostile", "input": text, "reference": reference, **kind}


def _rendering_bombs() -> list[Trial]:
    """Templates that would make hundreds of megabytes of a field of 30 kB, equal on both sides."""
    bomb, item = LONG_FIELD * 6500, {"a": "x" * 30_000}
    few = compared(LONG_FIELD * 800, LONG_FIELD * 800)
    many = {"type": "multi", "graders": {f"g{n}": few for n in range(20)}, "calculate_output": "g0"}
    return [
        Trial("a bomb", compared(bomb, bomb), item=item),
        Trial("a bomb for rouge", _rouge(bomb, bomb), item=item),
        Trial("a bomb of a multi", many, item=item),
        Trial("a bomb beyond the limit", compared(LONG_FIELD * 30_000, LONG_FIELD), item=item, answers=(400,)),
    ]


TRIALS: Sequence[Trial] = (
    Trial("a sleep outside of its session", code(ESCAPE)),
    *(Trial(name, code(TRY.format(gets=gets))) for name, gets in GETS.items()),
    *_rendering_bombs(),
    Trial("braces", compared("{{" * 100_000, "x"), answers=(400,)),
    Trial("a path of many steps", compared("{{item" + ".a" * 30_000 + "}}", "x"), answers=(400,)),
    Trial("parentheses to math", _math("{{item.answer}}"), sample="\\(" * 100_000),
    Trial("a reference of parentheses", _math("{{item.a}}"), item={"a": "\\(" * 100_000}),
    Trial("long texts to rouge", _rouge(OUTPUT, LONG_FIELD), sample="a " * 10_000, item={"a": "b " * 10_000}),
    *(Trial(f"{url[:30]!r} as endpoint", {"type": "endpoint", "url": url}, answers=(400,)) for url in URLS),
    *(Trial(f"{url!r} as endpoint", {"type": "endpoint", "url": url}, answers=(200, 400)) for url in OWN_URLS),
)
