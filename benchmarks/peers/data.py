"""Makes the jobs: their skills, and their items in the order in which MARLaaS draws them."""

from pathlib import Path

from benchmarks.peers.settings import Job, Row, Settings, write_job, write_rows, write_settings
from common.rng import permutation
from common.skills import SKILLS, generate

SINGLE_TURN = tuple(name for name, skill in SKILLS.items() if not skill.needs_calculator)
"""`calc` is left out: its tool calls take several turns, for which each peer would need a loop of its own."""


def make_jobs(num_jobs: int) -> list[Job]:
    """The skills in turn, each job with a seed of its own."""
    skills = [SINGLE_TURN[number % len(SINGLE_TURN)] for number in range(num_jobs)]
    return [Job(f"{number:02d}-{skill}", skill, seed=number + 1) for number, skill in enumerate(skills)]


def drawn(rows: list[Row], seed: int, number: int) -> list[Row]:
    """The first `number` items that a job draws from its file: group g gets permutation(seed, epoch)[g mod n]."""
    n = len(rows)
    orders = [permutation(seed, epoch, n) for epoch in range(-(-number // n))]
    return [rows[int(orders[group // n][group % n])] for group in range(number)]


def write_data(folder: Path, jobs: list[Job], settings: Settings) -> None:
    write_settings(folder, settings)
    for job in jobs:
        home = write_job(folder, job)
        rows = generate(job.skill, job.seed, settings.num_items, "train")
        write_rows(home / "items.jsonl", rows)
        write_rows(home / "drawn.jsonl", drawn(rows, job.seed, settings.num_steps * settings.batch_size))
        write_rows(home / "held_out.jsonl", generate(job.skill, job.seed, settings.num_held_out, "held_out"))
