"""The `math` grader: which part of a text is its final answer, and what that equals."""

import json
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from env_service.graders.answers import final_answer
from env_service.graders.comparing import equal, plainly_equal

DATA = Path(__file__).resolve().parents[1] / "data"
STEPS = "Tom has 5 + 4 = 9 apples.\nHe buys 9 more, so 9 + 9 = 18.\n"


class Graded(NamedTuple):
    text: str
    label: bool
    is_marked: bool
    reward: bool


@pytest.fixture(scope="module")
def graded() -> list[Graded]:
    """Solutions of sixteen people who had not seen the grader; see tests/data/README.md."""
    lines = [
        json.loads(line) for path in sorted(DATA.glob("math_texts_*.jsonl")) for line in path.read_text().splitlines()
    ]
    assert len(lines) == 2400
    return [
        Graded(text, bool(line["label"]), final_answer(text, reference).is_marked, equal(text, reference))
        for line in lines
        for text, reference in [(line["text"], line["reference"])]
    ]


@pytest.mark.parametrize(("is_marked", "most_wrong", "least"), [(True, 0, 0.98), (False, 0.003, 0.86)])
def test_it_agrees_with_the_labels_of_texts_with_a_marker_and_without(
    graded: list[Graded], is_marked: bool, most_wrong: float, least: float
) -> None:
    results = [each for each in graded if each.is_marked == is_marked]
    wrong = [each for each in results if not each.label]
    disagree = [each.text[-150:] for each in results if each.reward != each.label]
    assert len(results) > 1000
    assert sum(each.reward for each in wrong) <= most_wrong * len(wrong), "\n".join(disagree)
    assert 1 - len(disagree) / len(results) >= least, "\n".join(disagree)


def rewarded(text: str, reference: str) -> bool:
    """The verdict of plain comparison; it may not leave the question open."""
    verdict = plainly_equal(text, reference)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    "text",
    [
        # markers
        STEPS + "#### 18",
        STEPS + "#### $18.00",
        STEPS + "<answer>18 apples</answer>",
        STEPS + "**Answer:** $18.00",
        STEPS + "### Final Answer\n\n**18**",
        STEPS + "#### Result\nTom has 18 apples.",
        STEPS + "Final Answer: The final answer is $18$. I hope it is correct.",
        STEPS + "The answer is 18 apples.\n\nCheck: 9 + 9 = 18, and 18 - 9 = 9.",
        STEPS + "ANSWER IS 18!!!",
        STEPS + "A: 18",
        STEPS + "Answer: Tom has 18 apples in 3 bags",
        STEPS + "The answer is 18, because 2 times 9 is 9 + 9 = 18.",
        r"\boxed{18}",
        r"\boxed{20} Wait, 20 - 2 = 18: \boxed{18}",
        r"\boxed{20}" + "\n#### 18",
        "#### 20\n" + r"\boxed{18}",
        r"\fbox{18}",
        r"\boxed{x = 18}",
        r"\boxed{18\ \text{m}^2}",
        r"\boxed{\frac{36}{2}}",
        r"\boxed{\textbf{(D) }18}",
        "The answer is (c) 18.",
        "The answer is 18.\n\nQuestion: Ben has 3 apples. How many has he?\nAnswer: 3",
        r"$$\boxed{18}$$ This matches the sum, so the answer is reasonable.",
        # thoughts
        "<think>It is 20, or is it? \\boxed{20}</think>\n\nTom has **18** apples after 3 days.",
        "20? \\boxed{20}</think>#### 18",
        "#### 18 <think>or \\boxed{20}",
        # without a marker
        "It costs 2 * 8 = $<<2*8=16>>16. With $2 more it costs 16 + 2 = $<<16+2=18>>18.",
        STEPS + "Tom has 18 apples.",
        STEPS + "He has 18 apples, which is 2 less than Ann has.",
        STEPS + "He has **18** apples after 3 days.",
        STEPS + "Tom has 18 apples (3 bags of 6).",
        STEPS + "Tom has 18 apples.\n\nI hope this helps! Would you like another one?",
        STEPS + "Tom has 18 apples.\n\n**Verification:** 18 - 9 = 9 ✓",
        "18",
        "x = 18",
        "The answer is 9*2 = $18.",
        "The answer is $18 for 9 eggs (9 at $2 each).",
        "She makes 9 * 2 = $18 a day",
        "The answer is 2 eggs * 9 = 18",
        "**Answer:** \n$18",
        "Final Answer: $18/day",
        "The answer is: **18**",
        "4 * 5 = 20 apples, and after eating 2 of them he has 18 left.",
    ],
)
def test_the_final_answer_is_18(text: str) -> None:
    assert rewarded(text, "18")
    assert rewarded(text, STEPS + "#### 18")
    assert not rewarded(text, "20")


@pytest.mark.parametrize(
    ("answer", "reference", "holds"),
    [
        ("1,234", "1234", True),
        ("$1,234.50", "1234.5", True),
        ("1.234,50 €", "1234.5", True),
        ("1 234 people", "1,234", True),
        ("CHF 8'640", "8640", True),
        ("12,5", "12.5", True),
        ("R$38", "38", True),
        ("-$5", "-5", True),
        ("−5", "-5", True),
        ("5", "-5", False),
        ("8.7", "8.70", True),
        ("8.71", "8.70", False),
        ("3/4", "0.75", True),
        ("3 1/2", "3.5", True),
        ("3½ cups", "7/2", True),
        (r"2\frac{1}{2}", "2.5", True),
        ("21/2", r"2\frac{1}{2}", False),
        ("0.333333", "1/3", True),
        ("0.33", "1/3", False),
        ("20 %", "0.2", True),
        ("0.2", "20%", True),
        ("18 gallons of milk", "18", True),
        (r"2.7\ \text{g/cm}^3", "2.7", True),
        (r"3 \times 10^5", "300000", True),
        ("3 × 10⁻²", "0.03", True),
        (r"7.83 \approx 8", "8", True),
        ("2/15 ≈ 0.133", "2/15", True),
        ("1e3", "1000", True),
        ("1.5e3", "1500", True),
        ("2e-3", "0.002", True),
        (r"18 \text{ dollars}", "18", True),
        ("3 hours 5 min", "3 hours 5 min", True),
        ("3 hours 5 min", "3", False),
        ("3,4", "3,4", True),
        ("x = 5 or x = 6", "6", False),
        ("five", "5", False),
        ("either 10 or 12", "12", False),
        ("not 10 but 12", "10", False),
        ("0.5 or 1/2", "0.5", True),
        ("16:20", "16:20", True),
        ("7 h 15 min", "7 h 45 min", False),
        ("3:5", "3:5", True),
        ("Friday", "friday", True),
        ("Friday, as the 1st is a Monday", "Friday", True),
        ("not possible", "possible", False),
        (r"\text{north}", "north", True),
        ("(B)", "B", True),
        ("B", "C", False),
        (r"36\pi \text{ cm}^3", r"36\pi", True),
        ("7√2", r"7\sqrt{2}", True),
        ("(3, 5)", "(3,5)", True),
        ("x^2 - 2x - 15", "x^2-2x-15", True),
        ("9" * 5000, "5", False),
        ("1" * 300, "1" * 300, True),
        ("18 " * 600, "18", False),
    ],
)
def test_plain_answers_are_compared_without_a_library(answer: str, reference: str, holds: bool) -> None:
    assert rewarded(rf"\boxed{{{answer}}}", reference) == holds


@pytest.mark.parametrize(
    ("answer", "reference", "holds"),
    [
        (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+2", False),
        (r"\boxed{(3, 5)}", "(5, 3)", False),
        (r"\boxed{\begin{pmatrix} 5 \\ 1 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 5 \end{pmatrix}", False),
        (r"\boxed{2^{10}}", "1024", True),
        (r"\boxed{3.4}", "3,4", False),
        (r"The area is $4 \cdot 9\pi$ cm².", r"36\pi", True),
        ("x = y = 2z = 7 - w", r"7 - w", True),
    ],
)
def test_what_is_not_plain_is_left_to_math_verify(answer: str, reference: str, holds: bool) -> None:
    assert equal(answer, reference) == holds


HEDGED = (
    "5 and 6",
    "5; 6",
    "5 to 6",
    "5 vs 6",
    r"5 \text{ or } 6",
    r"5 \text{or} 6",
    "5 apples, 6 pears",
    r"\text{not } 5",
)
NEGATED = ("The answer is 5 or maybe 6.", "The answer is never 5", "The answer is definitely not 5.")


@pytest.mark.parametrize("text", [*(rf"\boxed{{{answer}}}" for answer in HEDGED), *NEGATED])
def test_a_hedged_or_negated_answer_earns_nothing(text: str) -> None:
    assert not rewarded(text, "5")


@pytest.mark.parametrize(
    "text",
    ["", "no idea", STEPS + "So 18 / 3 =", STEPS + "So it is 18.\nNow we", "<think>18", "<think>#### 18", "####"],
)
def test_a_text_without_an_answer_earns_nothing(text: str) -> None:
    assert not rewarded(text, "18")


@pytest.mark.parametrize(("text", "reward"), [(STEPS + "So it is 18.", False), (STEPS + "#### 18", True)])
def test_without_the_fallback_only_a_marker_counts(text: str, reward: bool) -> None:
    assert plainly_equal(text, "18", fallback=False) is reward
    assert equal(text, "18", fallback=False) is reward


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", "9**9**9**9", "100000000!", "(10^9)!", "2024!!", "5!!!", "(1+1)^{999999999}", r"9^{99999 \cdot 99999}",
        r"\left(9^9\right)^{9^9}", "((9^{99})^{99})^{99}", r"\binom{1000000000}{500000000}", "(" * 300 + "1+x" + ")" * 300,
    ],
)  # fmt: skip
def test_what_takes_long_to_compute_is_wrong_unless_it_is_the_reference(text: str) -> None:
    assert rewarded(rf"\boxed{{{text}}}", r"\sqrt{3}") is False
    assert rewarded(r"\boxed{\sqrt{3}}", text) is False
    assert rewarded(rf"\boxed{{{text}}}", text) is True


@pytest.mark.parametrize(
    "text", ["2^{2024}", "10!", "2024!", r"\frac{100!}{2}", r"\binom{n}{2}", "1.5^{10}", "x^{100000}"]
)
def test_what_can_be_computed_is_left_to_the_library(text: str) -> None:
    assert plainly_equal(rf"\boxed{{{text}}}", r"\sqrt{3}") is None


@pytest.mark.parametrize(
    "part",
    [
        "1", "1,", "1 ", "$", "-", "(", "{", "\\", "\n", " ", "*", "**", "**1** ", "<<", "~~", "<think>", "<answer>", "####", "#### 1\n",
        "answer ", "answer to ", "answer is ", "A:\n", r"\boxed{", r"\boxed{1}", r"\frac{", r"\text{", "√(", "\\(", "= 1 ", "≈ 1", "not 1 ",
        "Check: ", "1/2 ", " (1", "\nQ:", "⁴", "1*10^{", "1 or ", "!", "^1", "kg ", " /*-", "x = ", "about ", "A) ", "12:30 ", "AAA$",
    ],
)  # fmt: skip
def test_the_time_does_not_grow_with_a_hostile_text(part: str) -> None:
    started = time.process_time()
    for text in (part * 100_000, part * 100_000 + ".\n5", "#### " + part * 100_000, "#### " + (part * 900)[:900]):
        for reference in ("5", "x + 2y = 6", "1:30", "(" + "1" * 900):
            plainly_equal(text, reference)
    assert time.process_time() - started < 10
