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
from common.wire.messages import FailureKind


class NoRoom(Unavailable):
    """No room left for the environment: the message goes back, and another worker may have room."""


class TrajectoryFailed(Permanent):
    kind: ClassVar[FailureKind] = "environment"


class GraderFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "grader"


class ToolFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "tool"


class EnvironmentFailed(TrajectoryFailed):
    kind: ClassVar[FailureKind] = "environment"


def one_line(error: BaseException) -> str:
    """Its text, as a message can carry it: half a surrogate pair is escaped."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return text.encode(errors="backslashreplace").decode()


def place_of(error: BaseException) -> str:
    """File and line in foreign code that raised or called what raised; empty without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    place = next((frame for frame in reversed(frames) if _is_foreign(frame.filename)), frames[-1])
    return f" ({Path(place.filename).name}:{place.lineno})"


def _is_foreign(filename: str) -> bool:
    """Is it neither ours nor of the standard library, whose folder may hold other packages?"""
    file = Path(filename)
    if file.is_relative_to(Path(__file__).parent) or filename.startswith("<frozen "):
        return False
    return not file.is_relative_to(Path(traceback.__file__).parent) or "site-packages" in file.parts
