"""Counts how often the `math` grader agrees with labels, and times it.

    python -m benchmarks.math_grader [FILE ...] [--show 20] [--json FILE]

A file has lines `{"text", "reference", "label", "style"}`: a label is 1 if the text's final answer equals the reference, else 0.
Without one it reads the first person's texts; the others lie beside them. `--show` prints some of the texts on which they disagree.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._report import Goal, Report, make_table, natural, parser, show
from common.graders import MathGrader
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.text import TextComparer
from env_service.work import Allowance

TEXTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "math_texts_first.jsonl"
LIMIT_S = 10.0
GOAL_PERCENT = 99.5
_ERRORS = (("wrong_rewarded", False), ("right_missed", True))
"""Each figure, with the label of the texts of which it is a part."""


class Graded(NamedTuple):
    text: str
    reference: str
    label: bool
    style: str
    reward: bool
    seconds: float

    @property
    def agrees(self) -> bool:
        return self.label == self.reward


async def measured(paths: Sequence[Path]) -> list[Graded]:
    """Grades files in a helper process that begins and ends with them; see `graded`."""
    comparer = TextComparer()
    try:
        await equal(comparer, "\\sqrt{2}", "1")  # starts its helper
        return [result for path in paths for result in await graded(comparer, path)]
    finally:
        await comparer.close()


async def graded(comparer: TextComparer, path: Path, *, each: int = 1) -> list[Graded]:
    """Lines of a file with their rewards, one of each `each` lines. A comparison that takes too long has reward 0 here."""
    results = list[Graded]()
    for line in map(json.loads, path.read_text().splitlines()[::each]):
        started = time.perf_counter()
        try:
            reward = await equal(comparer, line["text"], line["reference"])
        except GraderFailed:
            reward = False
        seconds = time.perf_counter() - started
        results.append(
            Graded(line["text"], line["reference"], bool(line["label"]), line.get("style", ""), reward, seconds)
        )
    return results


async def equal(comparer: TextComparer, text: str, reference: str) -> bool:
    attempt = Attempt({"answer": reference}, text)
    return bool(await comparer.reward(MathGrader(type="math"), attempt, Allowance(LIMIT_S)))


def percent(results: Iterable[Graded]) -> float:
    return 100 * statistics.fmean(result.agrees for result in results)


def wrongly_rewarded(results: Iterable[Graded]) -> int:
    return sum(result.reward and not result.label for result in results)


def report(results: Sequence[Graded], shown: int) -> Report:
    styles = {style: [r for r in results if r.style == style] for style in sorted({r.style for r in results})}
    lines = [(style, len(found), percent(found), milliseconds(found)) for style, found in styles.items()]
    lines = sorted((line for line in lines if line[2] < 100), key=lambda line: line[2])
    lines.append(("all", len(results), percent(results), milliseconds(results)))
    wrong = [
        f"{r.style}: {r.text[-200:]!r}, reference {r.reference!r}, reward {r.reward:d}" for r in results if not r.agrees
    ]
    table = make_table("Agreement, all styles and those below 100 %", ("style", "texts", "agree %", "ms each"), lines)
    figures = {
        "agree_percent": percent(results),
        "wrong_rewarded": wrongly_rewarded(results),
        "right_missed": sum(result.label and not result.reward for result in results),
        "ms": milliseconds(results),
        "below": {line[0]: line[2] for line in lines},
    }
    counts = [(name, figures[name], sum(r.label == label for r in results)) for name, label in _ERRORS]
    tables = [table, make_table("Errors", ("", "texts", "of"), counts)]
    return Report(tables, figures, [Goal("agreement", percent(results), GOAL_PERCENT, " %")], wrong[:shown])


def milliseconds(results: Sequence[Graded]) -> float:
    return 1000 * statistics.fmean(result.seconds for result in results)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("files", type=Path, nargs="*", default=[TEXTS], metavar="FILE")
    options.add_argument(
        "--show", type=natural, default=20, metavar="N", help="texts on which they disagree, default 20"
    )
    given = options.parse_args()
    show(report(asyncio.run(measured(given.files)), given.show), given.json)


if __name__ == "__main__":
    main()
