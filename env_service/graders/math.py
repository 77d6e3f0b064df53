r"""The `math` grader: are two final answers mathematically equal?

The final answer is what follows the last `####`, or stands in the last `\boxed{}`, or is the last number or expression.
Two plain numbers are compared here, exactly. Everything else goes to math-verify, in a helper process: it parses with
sympy, which can take forever, and guards itself with signals that work in a main thread only. The helper starts when
it is first needed, answers one question after the other, and is killed when one takes too long.

As a program (`python -m env_service.graders.math`) this file is the helper.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import sys
import time
from fractions import Fraction
from typing import Any

from env_service import work
from env_service.failures import GraderFailed

MAX_ANSWER_CHARACTERS = 1000
"""A longer final answer counts as wrong."""
START_S = 30.0
"""Time to import sympy on a busy machine."""
HELPER_MEMORY_BYTES = 2 * 1024**3

_NUMBER = r"(?:(?<![\w.)])[-+])?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d[\d,]*)?\s*%?"
_ONLY_NUMBER = re.compile(_NUMBER)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(?!\d)")
_EXPRESSION = re.compile(r"(?:[\d\s+\-*/^().,={}\\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|pi|frac|log|sin|cos|exp)+")


def final_answer(text: str) -> str:
    """The part of a text that is its answer; the whole last line if there is no number in it."""
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0].strip()
    if (boxed := _last_boxed(text)) is not None:
        return _TEXT_COMMAND.sub(r"\1", boxed).strip()
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    if math := re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL):
        return next(part for part in math[-1] if part).strip()
    if _EXPRESSION.fullmatch(last):
        return last.rpartition("=")[2].strip()
    numbers = _ONLY_NUMBER.findall(text)
    return numbers[-1].strip() if numbers else last


def number(answer: str) -> Fraction | None:
    """A plain number: `1,234`, `-0.5`, `3/4`, `$18`, `50%` (as 50), `18.`; None for anything else."""
    text = answer.strip().strip("$").replace("\\$", "").replace("\\%", "%").replace("\\!", "").rstrip(". ").strip()
    if len(text) > 100 or not _ONLY_NUMBER.fullmatch(text):
        return None
    text = re.sub(r"[\s$€£%]", "", text)
    if "," in text and not all(_THOUSANDS.fullmatch(part) for part in re.findall(r"\d[\d,]*,[\d,]*", text)):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / (int(bottom) if bottom else 1)


def quick(answer: str, reference: str) -> bool | None:
    """True if two final answers are plainly equal, False if they plainly are not, None if math-verify must look."""
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if _squeezed(answer) == _squeezed(reference):
        return True
    ours, theirs = number(answer), number(reference)
    if ours is not None and theirs is not None:
        return ours == theirs or _rounded_alike(answer, ours, theirs)
    words = r"\s*[A-Za-z][A-Za-z \-']{2,}\s*"
    if re.fullmatch(words, reference) or re.fullmatch(words, answer):
        return False
    return None


def _rounded_alike(answer: str, ours: Fraction, theirs: Fraction) -> bool:
    """A decimal answer with at least six places may be rounded: 0.333333 is 1/3."""
    places = len(answer.partition(".")[2].rstrip("% "))
    return places >= 6 and abs(ours - theirs) <= Fraction(1, 10**6)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()


def _last_boxed(text: str) -> str | None:
    r"""The inside of the last `\boxed{...}` whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i]
    return None


class MathChecker:
    """Compares answers. Safe to use from many tasks; `close` ends the helper."""

    def __init__(self) -> None:
        self._helper: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def equal(self, text: str, reference: str, *, timeout_s: float) -> bool:
        """True if the final answers of two texts are equal. Raises GraderFailed if it takes too long, or if the
        reference has no answer."""
        expected = final_answer(reference)
        if not expected:
            raise GraderFailed("math: the reference is empty")
        answer = final_answer(text)
        found = quick(answer, expected)
        if found is not None:
            return found
        async with self._turn:
            return await self._ask(answer, expected, timeout_s)

    async def close(self) -> None:
        if self._helper:
            with contextlib.suppress(ProcessLookupError):
                self._helper.kill()
            await self._helper.communicate()
            self._helper = None

    async def _ask(self, answer: str, reference: str, timeout_s: float) -> bool:
        try:
            helper = await self._started()
            started = time.monotonic()
            async with work.time_limit(timeout_s):
                verdict = await self._exchange(helper, answer, reference)
        except (TimeoutError, ConnectionError) as error:
            await self.close()
            reason = f"longer than {timeout_s:g} seconds" if isinstance(error, TimeoutError) else "too much memory"
            raise GraderFailed(f"math: comparing the answers took {reason}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        work.charge(time.monotonic() - started)
        return verdict

    async def _started(self) -> asyncio.subprocess.Process:
        if self._helper is None:
            self._helper = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "env_service.graders.math",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
            async with work.time_limit(START_S):
                await self._exchange(self._helper, "1", "1")
        return self._helper

    async def _exchange(self, helper: asyncio.subprocess.Process, answer: str, reference: str) -> bool:
        assert helper.stdin and helper.stdout
        helper.stdin.write(json.dumps([answer, reference]).encode() + b"\n")
        await helper.stdin.drain()
        line = await helper.stdout.readline()
        if not line:
            raise ConnectionError("the helper ended")
        return json.loads(line) is True


def serve() -> None:
    """Runs the helper: reads lines `[answer, reference]` and answers `true` or `false`, until stdin ends."""
    # imported here: only the helper needs sympy
    import math_verify as untyped  # pyright: ignore[reportMissingTypeStubs]

    library: Any = untyped

    resource.setrlimit(resource.RLIMIT_AS, (HELPER_MEMORY_BYTES, HELPER_MEMORY_BYTES))

    def read(text: str) -> Any:
        return library.parse(f"${text.strip('$')}$", parsing_timeout=None)

    for line in sys.stdin:
        answer, reference = json.loads(line)
        verdict = library.verify(read(reference), read(answer), timeout_seconds=None)
        print(json.dumps(bool(verdict)), flush=True)


if __name__ == "__main__":
    serve()
