"""Refuses weights that are infinite or no numbers: all that a base model with one of them computes would be none."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from common.errors import InvalidInput


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises InvalidInput, naming the first, for weights with a value that is infinite or no number. Reads each once, to add it up."""
    for name, weight in weights:
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise InvalidInput(f"{folder}: {name} has values that are infinite or no numbers")
