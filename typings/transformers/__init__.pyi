"""transformers as pyright sees it: anything. Its own `__init__` names all its models, and reading those takes a third of `make check`."""

# pyright: reportIncompleteStub=false

from typing import Any

def __getattr__(name: str) -> Any: ...
