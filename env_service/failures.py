"""The reasons why a trajectory has no reward. `handler.py` makes a Failure value of each, at one place.

TrajectoryFailed
├── GraderFailed         the grader raised, hung, or gave something that is not a number
├── ToolFailed           a tool's process failed, or took too long
└── EnvironmentFailed    the environment broke its own contract

NoRoom is no failure: the trajectory waits.
"""

import traceback
from pathlib import Path
from typing import ClassVar

from common.errors import Permanent, Unavailable
from common.messages import FailureKind


class NoRoom(Unavailable):
    """What the environment runs on is full: the message goes back, and another worker may have room."""


class TrajectoryFailed(Permanent):
    kind: ClassVar[FailureKind] = "environment"


class GraderFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "grader"


class ToolFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "tool"


class EnvironmentFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "environment"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def place_of(error: BaseException) -> str:
    """Where foreign code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
