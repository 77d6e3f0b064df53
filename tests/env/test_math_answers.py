"""The `math` grader's final answers: which part of a text counts, and what it equals."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.math_grader import Graded, graded, wrongly_rewarded
from env_service.graders.answers.equality import quick
from env_service.graders.answers.final import final_answer
from env_service.graders.answers.plain import MAX_CHARACTERS, plain
from env_service.graders.math import plainly_equal
from env_service.graders.text import TextComparer

DATA = Path(__file__).resolve().parents[1] / "data"
TEXTS = sorted(DATA.glob("math_texts_*.jsonl"))
EACH = 11
"""One of so many texts of a file is graded here; `python -m benchmarks.math_grader` grades all of the files it is given."""
MISSED = {
    "math_texts_eleventh_blind": 3,
    "math_texts_fifth_blind": 2,
    "math_texts_ninth": 1,
    "math_texts_twentyfirst_blind": 2,
}
"""Right answers that may go without a reward, of the texts that are graded of a file; none of the others. No wrong one is rewarded."""
STEPS = "Tom has 5 + 4 = 9 apples.\nHe buys 9 more, so 9 + 9 = 18.\n"


def rewarded(text: str, reference: str = "18") -> bool:
    """The verdict of plain comparison; it may not leave the question open."""
    equal = plainly_equal(text, reference)
    assert equal is not None
    return equal


@pytest.fixture(scope="module")
def grade() -> Iterator[Callable[[Path], list[Graded]]]:
    """Grades a part of each file, all in one helper process."""
    with asyncio.Runner() as runner:
        comparer = TextComparer()
        yield lambda texts: runner.run(graded(comparer, texts, each=EACH))
        runner.run(comparer.close())


@pytest.mark.parametrize("texts", TEXTS, ids=lambda path: path.stem)
def test_it_agrees_with_the_labels_of_texts_in_a_hundred_styles(
    texts: Path, grade: Callable[[Path], list[Graded]]
) -> None:
    results = grade(texts)
    assert len(results) == len(texts.read_text().splitlines()[::EACH])
    wrong = [f"{r.style}: {r.text[-100:]!r} and {r.reference!r}" for r in results if not r.agrees]
    assert wrongly_rewarded(results) == 0, "\n".join(wrong)
    assert len(wrong) <= MISSED.get(texts.stem, 0), "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "It costs 2 * 8 = $<<2*8=16>>16. With $2 more it costs 16 + 2 = $<<16+2=18>>18. A: 18",
        "One bread is $5 and a cheese is $13, so together $5 + $13 = $18.",
        STEPS + "#### 18",
        STEPS + "#### Result\nTom has 18 apples.",
        STEPS + "<answer>18 apples</answer>",
        STEPS + '{"steps": [9, 18], "answer": "18"}',
        STEPS + "**Answer:** $18.00",
        STEPS + "Final Answer: The final answer is $18$. I hope it is correct.",
        STEPS + "The answer is 18 apples.\n\nCheck: 9 + 9 = 18, and 18 - 9 = 9.",
        STEPS + "The answer is 18.\n\nQuestion: Ben has 3 apples. How many has he?\nAnswer: 3",
        "<think>It is 20, or is it? \\boxed{20}</think>\n\nTom has **18** apples after 3 days.",
        "\\boxed{20}\n\nWait, that is wrong: 20 - 2 = 18.\n\n\\boxed{18}",
        "The answer is 20. I made a mistake: 9 + 9 is not 20. There are 18 apples.",
        "So Tom has 18 apples left, compared with 20 in the morning.",
        "In 3 years Tom will be eighteen.",
        "She pays $18 for 2 books.",
        STEPS + "**Answer: 18**\n\n*A common mistake is to answer 20.*",
        "Tom has 18 apples.\n\n(This kind of problem is common in grade 5.)",
        "18 cups.\n\n2. A farmer has 12 goats. How many legs have they?\nAnswer: 48",
        "#### 18\n\nAnn has 12 hats. How many are left?\n\n#### 9",
        "18 apples\n\nExplanation: Tom has 5 + 4 = 9. Then he gets 9 more.",
        "The answer is 17... no, sorry, 18.",
        "The answer is ~~20~~ 18.",
        "She needs 18 more to have 50.",
        "The answer is not 20 but 18.",
        "Die Antwort lautet 18 €.",
        "Also kostet es nach 2 Tagen 18,00 Euro.",
        "La respuesta es 18 manzanas.",
        "Donc, la réponse est 18.",
        "Ответ: 18 рублей.",
        "所以答案是18个。",
        "答えは18です。",
        "الجواب: ١٨",
        "Die Antwort ist achtzehn.",
        "Donc il reste dix-huit euros.",
        "一共有十八个。",
        "Η απάντηση είναι 18.",
        "Each of the 3 children gets 18 cookies.",
        "He needs 18 gallons at $3 per gallon.",
        "He sold 18 cakes, 12 in May and 6 in June.",
        "18 apples are left.\n\nIn the next video we will solve 4 similar problems!",
        "**18**\n\nTom had 30 and gave 12 away.",
        "A) 12\nB) 15\nC) 18\n\nAnswer: C",
        "$\\boxed{\\text{Answer: } 18}$",
        "<|channel|>analysis<|message|>20?<|end|><|start|>assistant<|channel|>final<|message|>18 apples.<|return|>",
        "The maximum value is 18, attained at x = 3.",
        "Answer: 20\n\nOn reflection, I double counted; it should be 18.",
        "One might think the answer is 20, but it is actually 18.",
        "4 * 5 = 20 apples, and after eating 2 of them he has 18 left.",
        "The value of x that satisfies 2x + 4 = 40 is 18.",
        "The cost is 20 - 2, or $18.",
        "Of the 30 pupils, 12 are girls and the other 18 are boys.",
        "There are 18 fruits. 12 of them are apples and 6 are pears.",
        "Tom is 18 years older than Ann, who is 12.",
        "It took 18 weeks of work at a speed of 3 pages a day.",
        "So there are 18. Quick check: 18 / 3 = 6.",
        "3 × 6 = *18*",
        "Die Zahl lautet 18,0.",
        "答:6个孩子一共需要18个苹果。",
        "18 minutes. The first part takes 12 minutes and the second 6 minutes, which we add together.",
        "She buys 12 pens for $20. For the rest you need 18 dollars.",
        "It takes her 18 minutes. She walks 10 minutes, waits 3, and rides for 5.",
        "So Tom has 18 apples. That was fun! Do you have another one for me? I can also try it with 3 boxes.",
        "Tom has 18 apples.\n\nHuman: Ben has 3 hats. How many has he?\n\nAssistant: Let me think",
        "Marbles at first: 30\nLost: 12\nMarbles now: 18",
        "Two are alike, so divide 36 by 2: 18 ways.",
        "**Distance = 18 km**\n\nExplanation: 6 km/h × 3 h.",
        "x = 20.\n\nCheck: 20 - 3 is not 15.\n\n**x = 18**",
        "So Tom has 18 apples. That is 6 less than Ann.",
        "Thus Tom earns $18. Without the tip he would have earned $15.",
        "9 + 9 = 18. Tom gets 18 pieces, for which 17 cuts are necessary.",
        "30 - 12 = 18\n\nRosie is 18 years old, and in 12 years she will be 30.",
        "# Solution\nThe width is 43 - 25 = 18 m.\n\n# Remark\nThe area would be 450 m².",
        "Tom needs 18 boxes.\n\nReason: 54 apples / 3 in a box = 18, and 17 boxes would hold only 51.",
        "Answer: The zoo has 18 zebras. There are 42 animals, thereof 24 are monkeys (8 + 16).",
        "18 - there are 6 packs with 3 pens each.",
        "In short, 18 rows.\n\n54 seats in rows of 3 gives us the number of rows.",
        "There were **18** cars:\n\n| Time | Cars |\n|---|---|\n| Morning | 12 |\n| Evening | 6 |",
        "The trip takes 18 minutes, or 1080 seconds.",
        "The trip takes 1080 seconds, i.e. 18 minutes.",
        "eggs = 4 * 5 = 20\ngood = eggs - 2\nprint(good)  # 18",
        "36 / 2 = 17.9, but since they can't hire half a taxi, they need 18 taxis.",
        "Per month that's 3 dollars; if she goes on for half a year, she'll have 18 dollars.",
        "The pair is 3 and 6. We were asked for their product → 18.",
        "18 of 100 apples are red. That is 18%.",
        "54 : 3 = 18\n\nAnswer: 3 kg of flour cost 18 euros.",
        "12 + 6 = 18\n\nTia spent $18, Sam $47.",
        "12 + 6 = 18\n\nThe interest is $18, bringing her account to $795.",
        "12 + 6 = 18\n\nThus 18 liters of water must be added to get a 37% solution.",
        "20 - 11 = 9. So 9 boxes hold 18 pens.",
        "9 + 9 = 18\n\n**The larger number is 18.** The smaller one is 9.",
        "12 + 6 = 18\n\nThe spring extends by 18 cm, 5 cm more than before.",
        "5 + 4 = 9\n\nThe cost is $9 per box, so she pays $18.",
        "The shop lent 18 books. This follows from 3 pupils with 6 each, since 3 × 6 = 18.",
        "2n + 4 = 40 gives 2n = 36, n = 18.",
        "Dividing the 36 players among 2 cabins shows us that in every cabin there sleep 18 players.",
        "Since the one hall holds 12 guests and the other 6.5, they have room for 18 guests.",
        "18 boys. Let me verify with the total: 18 boys + 22 girls = 40 pupils, precisely the number given.",
        "Let $s$ be the side:\n\\[ s^2 = 324 \\;\\Rightarrow\\; s = 18 \\]",
        "Bread £4.50, cheese £13.50. Sum £18",
        "He needs 18 euros more, 18 €.",
        "There are eighteen left, as six of the 24 were eaten.",
        "She is left with 18 stickers. She began with 30 and handed out 12.",
        "She has 18 left. Adding the 12 back: 18 + 12 = 30. Correct!",
        "The solution is $x = 18$; the other one, $x = -20$, makes no sense as a length.",
        "For the first place there are 3 choices, then 3, 2, 1: 18 orders altogether.",
        "Two cost $13. The belt is another $5. Adding them up, Maria paid $18 altogether.",
        "So 18 are left. Had he sold them for $2, he would have made $36, but that isn't asked.",
        "9 + 9 = 18. Tom has 18 points now and he only needs 2 more to reach 20!",
        "So 9 + 9 = 18.\n\nTom reads 18 pages, so close to 20!",
        "9 + 9 = 18. Tom has $18 now! He needs only $2 more for the $20 ball.",
        "9 × 2 = 18\n\nThe hall seats 18. If they add 2 more, they will be at 20.",
        "The total is $18.\n\nHow it breaks down:\n- Pens: 3 × $4 = $12\n- Caps: 2 × $3 = $6",
        "Total cost: $18\n\nPens: 3 × $4 = $12\nCaps: 2 × $3 = $6",
        "There were **18** at first. Going forward to verify: 18 − 10 = 8, 8 + 5 = 13. It works.",
        "So the number is 18. Does it check out? 3 × 18 = 54 and 54 − 7 = 47. Yes!",
        "n = 18. Let's test it: three times 18 is 54, minus 7 is 47. Perfect.",
        "n = 18. Plugging 18 into the equation gives 3 · 18 − 7 = 47, which is true.",
        "So n might be 17. Does it work? 3 × 17 = 51, but it should be 54. So no.\n\nTry 18: 3 × 18 = 54. Yes, it is 18!",
        "The number of right answers is 9 of 50. 9 ÷ 50 = 0.18, or 18%.\n\n**18%**",
        "It collapses to $18$; a numerical check with ten terms gave about 17.55.",
        "So the rope is 18 m long. It would be used up after 20 hours.",
        "So they need **18 metres** of rope. At, say, $10 per metre that would come to $180.",
        "He must score 40 - 22 = **18** points. That is 3 more than his average.",
        "It's 18 minutes slow. In 6 days it loses 6 × 3 = 18. The clock would be showing 11:42.",
        "I = 100 × 0.06 × 3 = 18\n\nSo the interest is $18, and the balance would be $118.",
        "x + 36 = 2x + 18, so x = 18\n\nSo the smaller angle is 18° and the larger angle is 36°.",
        "It's tempting to answer 20, but the question asks for the average: **18 km/h**",
        "**20**\n\nOops, I missed that two don't count. It should be **18**.",
        "You'd say 20 at first, but because two were counted twice the real number is 18.",
        "So Tom has 18 apples. There are 20 in the bag, so that's enough.",
        "His score was 18 points. The pass mark is 15 points.",
        "In conclusion, Lena needs 18 sweets. This leaves 2 in the bag of 20.",
        "Answer: She needs 18 sweets for her guests. She has 20, so 2 will be left.",
        "**Summary**\n* Friday: 8\n* Saturday: 10\n* **Both days: 18**",
        "Candidates are 9, 18 and 24. Of those only 18 has digit sum 9 and two digits.",
        "After taking 7 of the 25 pencils out of the box, you have 18.",
        "Trying 16: 16 + 16 = 32, no.\nTrying 18: 18 + 18 = 36, yes.",
        "So a = 20, b = 1, c = -3 and a + b + c = 18.",
        "She needs **18 weeks** to save up. That's just about four months of saving.",
        "24 - 6 = 18, so 18 rooms are free. That's exactly one floor's worth of rooms.",
        "12 + 6 = 18. So Nico will be 18 years old. By then Grandma will be 77.",
        "x = 18. So x must be 18. Plugging it back in: 18 + 2 = 20 and 4 * 5 = 20, which matches.",
        "3 × 6 = 18. There are 18 ml of acid in it; the other 240 ml are water.",
        "3 × 6 = 18.\n\nSo customers can pick from 18 sandwiches.",
        "You can fill 18 cups. Here's why: a cup is 1/3 l, so 3 cups take 1 l. 6 l are as much again six times.",
        "18\n\nFirst multiply: 3 × 4 = 12. Then add 6.",
        "So the team scored 18 points. Insects have six legs anyway.",
        "**18 minutes.**\n\nA machine takes 18 minutes. So 5 machines make 5 parts in the same 18 minutes.",
        "90 / 5 = 18\n\nHe will have $90 after 18 weeks.",
        "x = 18\n\nIn 18 years. Ann will then be 20 and her mother 40, and 40 = 2 × 20.",
        "So they meet after 36 / 2 = 18 hours. At that time one has gone 160 km and the other 200 km.",
        "72 / 4 = 18. They meet after 18 hours.\n\nAt that time one has gone 30 km and the other 42 km, which adds up to 72 km.",
        "The larger root is 18.\n\nSolving yields x = 2 and x = 18, and 18 is the larger of these.",
        "c = 18.\n\nThere are **18 cows** (and 12 hens). Check: 72 + 24 = 96 ✓.",
        "41 - 9 = 32; 36 ÷ 2 = 18.\n\nCheck: 18·2 = 36. ✓ \n\nThe number is 18.",
        "So $\\int_0^3 (2x+3)\\,dx = 18$.",
        "8 × CHF 2 = CHF 16\nCHF 16 + CHF 2 = CHF 18\n\nThe ride costs CHF 18.-",
        "18. She reads 6 pages a day for 3 days.",
        "LCM(2, 9): since 2 and 9 share no factors, LCM = 2 × 9 = 18.",
        "24 − 6 = 18\n\nThe price is **$18**, so you save $6.",
        "30 - 12 = 18. **The price is $18.** So you save $12 compared to the full price of $30.",
        "It goes 6 × 3 = 18 miles. If it had left an hour earlier, it would have gone 24.",
        "6 × 3 = 18. So there are 18 apples. I used the fact that each of the 3 bags holds the same.",
        "The new price is thus $18 — 2 dollars more than before.",
        "n = 18. The other root, n = −3, is rejected since n counts people.",
        "d + 2 = 20, d = 18. Dan is 18 today and will be 20 in 2 years.",
        "3 × 6 = 18 codes are possible. If digits couldn't repeat there'd be only 6.",
        "There are 18 faces, 12 edges and 8 vertices. The question is about faces: 18.",
        "F = 2 kg · 9 m/s² = 18 N.",
        "Each bag costs **$3**, so 6 bags cost $18.",
    ],
)
def test_the_final_answer_counts(text: str) -> None:
    assert rewarded(text)


@pytest.mark.parametrize(
    "text",
    [
        STEPS + "The answer is 20.",
        STEPS + "So Tom has",
        STEPS + "The answer is",
        STEPS + "\\boxed{",
        STEPS + "How many apples has Tom?",
        "<think>It is 18. The answer is 18.",
        "The answer is 18 or 20.",
        "Answer: 17, 18, 19",
        "It could be 17, 18 or 19, I am not sure.",
        "\\boxed{17}, \\boxed{18}",
        "16 17 18",
        "16\n17\n18",
        "The answer is between 17 and 18.",
        "The answer is not 18.",
        "Die Antwort ist nicht 18.",
        "答案不是18。",
        "18 is not the answer.",
        "\\boxed{\\geq 18}",
        "The answer is 18x.",
        "The answer is -18.",
        "The answer is 18 thousand.",
        "Options: (A) 17 (B) 18",
        "Tom had 18 apples, but now he has 20.",
        "She pays $20 for 18 books.",
        "The answer is 18. Hold on, that counts the dog twice. It should be 17.",
        "The answer is 18 if tax is included, otherwise 20.",
        "I can't tell. The problem mentions 18, so I will not give an answer.",
        "#### 18 #### 20",
        "La respuesta es 18 o 20.",
        "答えは18または20です。",
        "Let x = 18.",
        "Given: 20 apples, 18 boxes.",
        "The problem states that 18 apples are in 3 boxes.",
        "Pens: $6\nBooks: $18",
        "Pens: $18\nBooks: $18",
        "So there are 20 apples and 18 pears.",
        "20 apples are left. Try it yourself with 18 apples!",
        "The answer is eighteen point five.",
        "If tax is included, it is 20; otherwise, it is 18.",
        "The mean is 20 and the median is 18.",
        "The total is 18, or if you count the driver, 19.",
        "So the equation is 2 + x = 18.",
        "Finally, divide the total by 18.",
        "Start by multiplying 4 by 18.",
        "It is roughly 12-18.",
        "Tom gets $20, Ann $18.",
        "18 boxes would be too few.",
        "The price is $18, but we don't know how many were sold.",
        "**18** or **20**",
        "She needs 18 dollars for 12 pens. For 24 pens you need 36 dollars.",
        "15 16 17 18",
        "On Monday she works 18 hours. In both weeks she works 18 + 12 = 30 hours.",
        "There were ¥18 in all. From ¥40 he gets ¥22 back.",
        "He gets 18 cards. Each pack has 3 cards, and 6 packs cost 20 dollars.",
        "The solution is x = 18, y = 20. Substituting back, y = 38 - 18 = 20.",
        "Step 2: Subtract 18 from 24",
        "The sum of 12 and 19 is what we need, then we subtract 18 from 50 to get the answer.",
        "Hint: first find how many weeks there are in 18 days, then multiply.",
        "3 * 8 = 18 and then we subtract the 5 that were",
        "The composition evaluates to $20$. I could also give f(4) itself which is 18.",
        "ANSWER: 18\n\n(or 34 if the nickel counts)",
        "So the number is 18. Does it check out? 3 × 18 = 54 and 54 − 7 = 47, but we need 50. No! Then n = 19.",
        "9 + 11 = 20.\n\nTom has 20 points, just 18 short of 38!",
        "There are 18 chairs.\n\nHow it works:\n18 − 3 = 15\n15 / 3 = 5",
        "9 × 5 = 45 and 8 × 2 = 18. All in all they sold 63 that week!",
        "So one box holds 18 eggs. Five boxes hold 90.",
        "6 × 3 = 18. So he has 18 apples. He gives 3 away and has 15.",
        "So each pays $18. That's $54 for three.",
        "So the side is 18 cm. That's a perimeter of 72 cm.",
        "So the side is 18 cm. The perimeter is 72 cm.",
        "9 × 2 = 18. There are 18 pupils; 5 are ill, so 13 come.",
        "So he needs 18 boards. It is 36 boards for both walls.",
        "So he earns 18 dollars. By then he has spent 5, which leaves 13.",
        "You can fill 18 cups. Here's why: a cup is 1/3 l. So 21 cups can be filled.",
        "18\n\nMultiply by 2: 18 × 2 = 36. Then subtract 4.",
        "So one box holds 18 eggs. Five boxes would hold 90 eggs.",
        "So the interest is $18. That makes $118 in the account.",
        "So Tom is 18 years old. Five years ago he was 13.",
        "So there are 18 apples. However, 2 are rotten. That leaves 16.",
        "The answer could be 18, but without more information I can't be certain.",
        "So 18% walk and the others do not. The question wants those who don't: 82%.",
        "So k = 18. Let me double check: 18 / 3 = 6. OK wait, should it be larger? Then k/3 = 7 and therefore k = 21.",
        "2x + 9 = 2x + 18 gives 9 = 18, which is impossible.\n\nThere is no solution.",
        "48 ÷ 5 = 18 R 3.\n\nAfter filling 18 boxes, 3 eggs are left over.",
        "44/7 = 18.3, and a part of a van can't be hired.\n\nThey need 7 vans.",
        "2 × 18 = 36. The numbers are 36 and 18, so the larger one is 36.",
        "The chance of red is 1 in 18, i.e. 1/18.",
        "18 g = 0.018 kg",
    ],
)
def test_a_number_that_is_only_mentioned_does_not(text: str) -> None:
    assert not rewarded(text)


@pytest.mark.parametrize(
    ("text", "reference", "equal"),
    [
        ("Das macht 1.234,50 €.", "1234.5", True),
        ("The answer is 1.234.", "1234", False),
        ("₹1,50,000", "150000", True),
        ("The answer is 1.5 million.", "1500000", True),
        ("It takes two and a half hours.", "2.5", True),
        ("4 2/5 cups", "\\frac{22}{5}", True),
        ("25%", "0.25", True),
        ("0.25%", "25%", False),
        ("50 cents", "$0.50", True),
        ("€18", "$18", False),
        ("The ratio is 5 to 3.", "5:3", True),
        ("3:5", "5:3", False),
        ("It ends at 3:30 p.m.", "3:30", True),
        ("3:30 AM", "3:30 PM", False),
        ("The solutions are $x = 3$ and $x = 2$.", "2, 3", True),
        ("\\boxed{(2, 3)}", "(3, 2)", False),
        ("\\boxed{(-\\infty, 3]}", "(-\\infty, 3)", False),
        ("52_9", "52_8", False),
        ("The answer is (B) 18.", "B", True),
        ("The answer is (B) 18.", "18", True),
        ("The fastest runner is Evelyn.", "\\text{Evelyn}", True),
        ("The answer is Evelyn or Ben.", "\\text{Evelyn}", False),
        ("The answer is Evelyn, Ben or Tom.", "\\text{Evelyn}", False),
        ("The answer is Evelyn. Or Ben.", "\\text{Evelyn}", False),
        ("Evelyn Ben", "\\text{Evelyn}", False),
        ("Ben Evelyn", "\\text{Evelyn}", False),
        ("Evelyn has the most apples.", "\\text{Evelyn}", True),
        ("Ben ran 3 km. So Evelyn ran farther than Ben.", "\\text{Evelyn}", True),
        ("At first it looks like Ben, but Evelyn is faster.", "\\text{Ben}", False),
        ("Evelyn and Ben are equally fast.", "\\text{Evelyn}", False),
        ("If today is Sunday, then in 9 days it will be Tuesday.", "Tuesday", True),
        ("If today is Sunday, then in 9 days it will be Tuesday.", "Sunday", False),
        ("Ten days after March 4 is March 14, 2024.", "March 14", True),
        ("20 > 18, so yes, she can buy it.", "Yes", True),
        ("There are no apples left.", "No", False),
        ("A and C are too large, so it has to be B.", "B", True),
        ("The terms are 2, 4 and 8.", "2, 4, 8", True),
        ("It ends at 3 pm.", "3:00 PM", True),
        ("She is 5'6\" tall.", "66 inches", True),
        ("It is Thursday, 2 days after Tuesday.", "\\text{Tuesday}", False),
        ("Hence the result is Tuesday (2 days after Sunday).", "\\text{Tuesday}", True),
        ("The 14th of March", "\\text{March 14}", True),
        ("Answer: no solution", "\\text{no solution}", True),
        ("## Answer\n\n(B) 12\n\n## Why\n\nIt is 3 * 4.", "\\text{(B)}", True),
        ("21/2", "2\\frac{1}{2}", False),
        ("12 km", "12 \\text{ cm}", False),
        ("12000 m", "12 \\text{ km}", True),
        ("1 h 20 min", "1 hour 20 minutes", True),
        ("3:45 AM", "3:45 \\text{ PM}", False),
        ("x = 6, y = 1", "x=1, y=6", False),
        ("y = 6 and x = 1", "x=1, y=6", True),
        ("The answer is 3 < x.", "x > 3", True),
        ("x < -2 or x > 3", "(-\\infty, -2) \\cup (3, \\infty)", True),
        ("\\boxed{[-2, 5)}", "(-2, 5]", False),
        ("$0.\\overline{36}$", "\\frac{4}{11}", True),
        ("It is 4.5 × 10³ m.", "4500", True),
        ("She gets home at half past six.", "6:30", True),
        ("There are none left over.", "0", True),
        ("We need to (1) add the prices and (2) subtract the discount.", "2", False),
        ("(A) 17 (B) 18 (C) 19\n\nI'd go with C.", "C", True),
        ("31 ÷ 7 = 4 remainder 3", "4 R 3", True),
        ("The car drives at 75 m/s.", "75 km/h", False),
        ("It moves at 72 kilometers per hour.", "20 m/s", True),
        ("The area is 49 square metres.", "49\\text{ cm}^2", False),
        ("The area is 0.0049 m².", "49\\text{ cm}^2", True),
        ("P = 5 + 12 + 13 = 30 inches", "30 \\text{ cm}", False),
        ("The matrix is [[0, 1], [-1, 0]].", "\\begin{pmatrix}0&1\\\\-1&0\\end{pmatrix}", True),
        (
            "\\boxed{\\begin{bmatrix} 1 & 3 \\\\ 2 & 4 \\end{bmatrix}}",
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            False,
        ),
        ("$\\sum_{k=1}^{10} k = 55$", "55", True),
        ("The number is 11.", "1011_2", False),
        ("This reduces to 3 = 5, a contradiction. There is no solution.", "\\emptyset", True),
        ("The diagonal measures $10\\sqrt{2} \\approx 14.14$ cm.", "14.14", True),
        ("3x + 1 = 7 → x = 2 → y = 5.", "x = 2, y = 5", True),
        ("3x + 1 = 7 → x = 2 → y = 5.", "2", False),
        ("So one number is 12 and the other 8.", "8 \\text{ and } 12", True),
        ("Reverse the sign. x is at most 4.", "x < 4", False),
        ("So x lies strictly between -2 and 3.", "-2 < x < 3", True),
        ("One marble costs 12p.", "0.12", True),
        ("It lasts 7 hours and 30 minutes.", "7\\text{ hours }30\\text{ minutes}", True),
        ("He is 6 feet 2 inches tall (that's 74 inches).", "6\\text{ ft }2\\text{ in}", True),
        ("The scale is 1:50000.", "1:50{,}000", True),
        ("**Solution:** x = 4, y = -1", "(4, -1)", True),
        ("The lines cross at x = 2, y = 5.", "(2, 5)", True),
        ("So Ruth is 23 and Saul is 18.", "(23, 18)", True),
        ("So Ruth is 23 and Saul is 18.", "18", False),
        ("The solutions are $(x,y)=(1,2)$ and $(x,y)=(2,1)$.", "(1,2),(2,1)", True),
        ("The quotient is **2x² - 3x + 1** with remainder 0.", "2x^2-3x+1", True),
        ("So it is approximately **16.67%**, or exactly 1/6.", "\\frac{1}{6}", True),
        ("P = 5/36, a little under 14%.", "\\frac{5}{36}", True),
        ("The greatest is **(C) 46%**.", "C", True),
        ("**C**\n\nThe others are rational, 22/7 for one.", "C", True),
        ("It will be Thursday. 98 days are 14 weeks, then two more days.", "Thursday", True),
        ("x = 1,5", "1.5", True),
        ("So x is 1, 5.", "1.5", False),
        ("So 1,500 people came.", "1.5", False),
        ("There's a one in four chance.", "\\frac{1}{4}", True),
        ("The ratio is 2 to 3.", "2/3", True),
        ("17 divided by 7 is 2 with a remainder of 3.", "2 R 3", True),
        ("So 20 is 40% of 50.", "40", True),
        ("The field measures 2400 m², i.e. 0.24 hectares.", "2400", True),
        ("16", "(x-3)^2+(y+2)^2=16", False),
        ("\\boxed{16}", "(x-3)^2+(y+2)^2=16", False),
        ("The squared radius is 16.", "(x-3)^2+(y+2)^2=16", False),
        ("The equation is (x - 3)^2 + (y + 2)^2 = 16.", "(x-3)^2+(y+2)^2=16", True),
    ],
)
def test_what_an_answer_means_is_compared(text: str, reference: str, equal: bool) -> None:
    assert rewarded(text, reference) == equal


HOSTILE = [
    "\\(",
    "{{",
    "\\boxed{",
    "#### 5\n",
    "1 ",
    "1,111",
    "the answer is ",
    "not ",
    "Question: 5\nA: 5\n",
    "so 5 ",
    "$1",
    "**a** ",
    "<<5=",
    "5 (a ",
    "Wait 5. ",
    "5 is the answer. ",
    "Answer\n",
    "\n\nhow many 5? ",
    "x<5 or ",
    "to a ",
    "half of 5 ",
    "if 5 ",
    "Tom 5, ",
    "18 kg or 5 km ",
    "Reason: 5 = 6 / 7. ",
    "; if 5, 6 ",
    "x = 5 → ",
    "one is 5 and the other ",
    "\\begin{matrix}1&",
    ", so five ",
    "(or 5 if ",
    "does it work? 5 ",
    "x x ",
    "x\\pi ",
    "check: x ",
    "So 5 a. It would 6. ",
    "and the 5 would ",
    "has two a because ",
    "is 5: 5 = ",
    ", a a a being ",
    "$x=5$ or ",
    "Tom is 5 and ",
    "2. Ab\n",
    "5 = 5 + ",
    "! ✓",
    "5+",
    "a+5",
    "**5** so 6 ",
    "5 kg · 5 = ",
    "5 is: 5 = 6 ",
]


@pytest.mark.parametrize("part", HOSTILE)
def test_the_time_does_not_grow_with_a_hostile_text(part: str) -> None:
    final_answer(part * 10)
    started = time.process_time()
    final_answer(part * 100_000)
    final_answer(part * 100_000, "x + 2y = 6")
    assert time.process_time() - started < 5
    assert len(part * 100_000) > MAX_CHARACTERS


def test_blanks_without_an_end_are_as_good_as_a_few() -> None:
    assert plain("18\n" + " \n" * 3000 + "apples" + " " * 900 + "\n3" + " " * 900 + "4") == "18\n\napples\n3 4"


def test_the_texts_have_both_labels_in_most_styles() -> None:
    labels = {
        line["style"]: set[int]()
        for line in map(json.loads, (DATA / "math_texts_first.jsonl").read_text().splitlines())
    }
    for line in map(json.loads, (DATA / "math_texts_first.jsonl").read_text().splitlines()):
        labels[line["style"]].add(line["label"])
    assert sum(len(found) == 2 for found in labels.values()) > 0.8 * len(labels)


HUGE = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "100000000!",
    "(10^9)!",
    "2024!!",
    "5!!!",
    "(1+1)^{999999999}",
    r"9^{99999 \cdot 99999}",
    r"\left(9^9\right)^{9^9}",
    r"\binom{1000000000}{500000000}",
    "(" * 300 + "1+x" + ")" * 300,
]
MODEST = [
    "2^{2024}",
    "2^{2^5}",
    "10!",
    "2024!",
    r"\frac{100!}{98!}",
    "5!!",
    "(3!)!",
    "x^{2^{99n}}",
    r"\binom{n}{2}",
    "1.5^{10}",
    "x^{100000}",
]


@pytest.mark.parametrize("text", HUGE)
def test_what_takes_long_to_compute_is_wrong_unless_it_is_the_reference(text: str) -> None:
    assert quick(text, r"\sqrt{3}") is False
    assert quick(r"\sqrt{3}", text) is False
    assert quick(text, text) is True


@pytest.mark.parametrize("text", MODEST)
def test_what_can_be_computed_is_left_to_math_verify(text: str) -> None:
    assert quick(text, r"\sqrt{3}") is None


@pytest.mark.parametrize(
    "text", ["#### 5" + "\n" * 9000, "#### 5\n" + "wait \n" * 1500, "#### " + "1" * 4000 + "<x<" + "1" * 4000 + ")"]
)
def test_a_hostile_text_behind_a_marker_takes_no_longer(text: str) -> None:
    started = time.process_time()
    quick(final_answer(text) or text, "1" * 240 + "<x<" + "1" * 240 + ")")
    assert time.process_time() - started < 5
