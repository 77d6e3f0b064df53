"""`example`: runs one of the programs in `examples/`."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import call
from typing import Annotated

import typer

from common.errors import InvalidInput
from marlaas_client.cli.output import cells, print_table, table

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""All that follows the name goes to the example as it is."""


def example(
    name: Annotated[str | None, typer.Argument(help="Without it: which there are.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The example's own; --help lists them.")] = None,
) -> None:
    """Run an example: `marlaas example quickstart --steps 5`; without a name, list them."""
    programs = _programs()
    if name is None:
        return _show(programs)
    if name not in programs:
        raise InvalidInput(f"there is no example {name!r}: {', '.join(programs)}")
    raise typer.Exit(call([sys.executable, "-m", f"examples.{name}", *(arguments or ())]))


def _programs() -> dict[str, Path]:
    """Name -> file, of the examples that are run."""
    spec = find_spec("examples")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    return {file.stem: file for file in files if "__main__" in file.read_text("utf-8")}


def _show(programs: dict[str, Path]) -> None:
    shown = table("example", "what it does")
    for name, file in programs.items():
        about = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        shown.add_row(*cells(name, about.partition("\n")[0]))
    print_table(shown)
