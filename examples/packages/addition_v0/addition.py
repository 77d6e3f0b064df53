"""Sums of two numbers, for verifiers up to 0.3: nothing here knows who trains on it."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str, **kwargs: Any) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion: Any, **kwargs: Any) -> float:
    return float(len(completion[-1]["content"]))


def load_environment(num_tasks: int = 2000) -> vf.Environment:
    rng = random.Random(0)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(num_tasks)]
    rows = [{"question": f"add {a}+{b}", "answer": str(a + b)} for a, b in pairs]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    )
