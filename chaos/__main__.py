"""A whole MARLaaS under a seeded stream of faults.

    python -m chaos [--faults 1000] [--seconds S] [--seed N] [--quick] [--mode both]

Every fault is a function of the seed: the same seed strikes the same victims in the same order. Half of the faults strike a
cluster in deterministic mode, where every job must give the bytes of an undisturbed run; the others one in default mode.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from chaos.act import Act, Plan
from chaos.cluster import Cluster
from chaos.report import Story, costs, table
from chaos.tenants import FEW

MODES = {"both": (True, False), "deterministic": (True,), "default": (False,)}
QUICK: dict[str, Any] = {"seconds": 6.0, "ramp_s": 0.0, "calm_s": 0.0, "recipes": FEW}


def options() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--faults", type=int, default=1000, help="that hit something; default %(default)s")
    result.add_argument("--seconds", type=float, help="at most, of faults in each mode; default: until all have struck")
    result.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a random one")
    result.add_argument("--mode", choices=MODES, default="both", help="default %(default)s")
    result.add_argument(
        "--quick", action="store_true", help="deterministic mode alone, three short jobs, 6 seconds of faults"
    )
    return result


def main() -> None:
    given = options().parse_args()
    again = command(given)
    sys.stdout.write(f"seed {given.seed}; the same again: {again}\n")
    wrong = sum(map(act, plans(given)))
    if wrong:
        sys.exit(f"{wrong} findings; the same faults again: {again}")


def command(given: argparse.Namespace) -> str:
    """The command that plays the same plans."""
    args = f"--seed {given.seed} --faults {given.faults} --mode {given.mode}"
    args += "" if given.seconds is None else f" --seconds {given.seconds}"
    return f"make chaos ARGS='{args}{' --quick' if given.quick else ''}'"


def plans(given: argparse.Namespace) -> list[Plan]:
    """A plan for each mode."""
    modes = MODES["deterministic" if given.quick else given.mode]
    each = given.faults // len(modes)
    made: dict[str, Any] = {"seed": given.seed, "seconds": given.seconds}
    if given.quick:
        made |= QUICK
    return [
        Plan(hits=each, skipped=number * each, deterministic=deterministic, **made)
        for number, deterministic in enumerate(modes)
    ]


def act(plan: Plan) -> int:
    """Plays an act and tells of it. Returns how much was wrong; then its folder stays."""
    sys.stdout.write(f"{'deterministic' if plan.deterministic else 'default'} mode\n")
    folder = Path(tempfile.mkdtemp(prefix="marlaas-chaos-"))
    story = asyncio.run(Act(plan, Cluster(folder, plan.deterministic)).run())
    tell(story)
    if story.wrong:
        sys.stdout.write(f"logs and files are in {folder}\n")
    else:
        shutil.rmtree(folder)
    return len(story.wrong)


def tell(story: Story) -> None:
    kills = sum(fault.kind == "kill" for _, fault in story.strikes)
    survived = "with findings" if story.wrong else "survived"
    sys.stdout.write(
        f"{len(story.strikes)} faults {survived}, {kills} of them SIGKILL; {len(story.missed)} more hit nothing\n"
    )
    sys.stdout.write("".join(f"WARNING  {line}\n" for line in story.warnings + story.never_hit()))
    sys.stdout.write("".join(f"WRONG  {line}\n" for line in story.wrong))
    if story.ended:
        sys.stdout.write(table(costs(story)) + "\n")


if __name__ == "__main__":
    main()
