"""The action and the observation."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class LargestAction(Action):
    """An answer to the question."""

    answer: str = Field(..., description="The largest number")


class LargestObservation(Observation):
    """The next question."""

    question: str = Field(default="", description="Asks for the largest of some numbers")
