"""The client's package beside the services': one version, the same needs, and the API's own records; and both need what they import."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any, get_args

import pytest

from manager_service.http import schemas
from manager_service.records.job_records import FINAL, Status
from marlaas_client import records

ROOT = Path(__file__).resolve().parents[2]


FOR_OTHERS = ("examples/packages/", "examples/largest_env/", "examples/tinker_loop.py", "env_service/verifiers/host.py")
"""They run in Python environments of their own."""
BROUGHT = {
    "hiredis": ("redis",),
    "huggingface-hub": ("transformers", "datasets"),
    "pyarrow": ("datasets",),
    "starlette": ("fastapi",),
}
"""Not named by us, since each of these needs them."""
OF_CUDA = {"triton"}
"""torch for CUDA brings them, and only there what imports them is imported."""


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def test_the_packages_have_one_version_and_agree_on_what_both_need() -> None:
    client, services = project("marlaas_client"), project(".")
    assert client["project"]["version"] == services["project"]["version"]
    assert set(client["project"]["dependencies"]) <= set(services["project"]["dependencies"])
    assert client["project"]["requires-python"] == services["project"]["requires-python"]


@pytest.mark.parametrize("folder", [".", "marlaas_client"])
def test_a_package_needs_what_it_imports(folder: str) -> None:
    own = project(folder)
    needed, extras = named(own["project"]["dependencies"]), own["project"]["optional-dependencies"]
    lazily = needed | named(line for extra in extras if extra != "dev" for line in extras[extra])
    distributions = packages_distributions()
    missing = [
        (file, name)
        for file, name, in_function in imports(shipped(own, folder))
        if name not in OF_CUDA and not distribution(name, distributions) & (lazily if in_function else needed)
    ]
    assert not missing


def test_what_is_not_named_is_brought_by_what_is() -> None:
    for brought, several in BROUGHT.items():
        for by in several:
            assert brought in named(line for line in requires(by) or [] if "extra ==" not in line or "hiredis" in line)


def shipped(own: dict[str, Any], folder: str) -> Iterator[Path]:
    """The files of a package's wheel."""
    setup = own["tool"]["setuptools"]
    patterns = setup["packages"]["find"]["include"] if folder == "." else ["marlaas_client*"]
    for pattern in patterns:
        yield from (ROOT / pattern.rstrip("*").replace(".", "/")).rglob("*.py")


def imports(files: Iterable[Path]) -> Iterator[tuple[str, str, bool]]:
    """(file, name of a package that is neither ours nor Python's, is it imported in a function?)"""
    ours = {path.name for path in ROOT.iterdir()} | set(sys.stdlib_module_names)
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        for node in [] if file.startswith(FOR_OTHERS) else ast.walk(ast.parse(path.read_text())):
            for name in {whole.partition(".")[0] for whole in imported(node)} - ours:
                yield file, name, getattr(node, "col_offset", 0) > 0


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
            return [module]
        case _:
            return []


def named(requirements: Iterable[str]) -> set[str]:
    """Names of distributions, as the index writes them."""
    return {re.split(r"[\[><=!~; ]", line)[0].lower().replace("_", "-") for line in requirements}


def distribution(name: str, known: Mapping[str, Sequence[str]]) -> set[str]:
    """The package that this is a part of, or those that bring it. vLLM has several."""
    found = named([*known.get(name, ()), name])
    return found.union(*(BROUGHT.get(one, ()) for one in found))


def test_the_clients_package_has_each_of_its_folders() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "marlaas_client").rglob("__init__.py")}
    assert project("marlaas_client")["tool"]["setuptools"]["packages"] == sorted(
        ".".join(folder.parts) for folder in folders
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (records.Job, schemas.JobObject),
        (records.Event, schemas.EventObject),
        (records.Error, schemas.ErrorObject),
        (records.Ledger, schemas.LedgerObject),
        (records.Sample, schemas.SampleObject),
    ],
)
def test_the_clients_records_are_the_apis(ours: Any, theirs: Any) -> None:
    of_lines_alone = {"turns"}  # of samples as JSONL
    assert set(ours.__annotations__) - of_lines_alone <= set(theirs.model_fields)


def test_the_client_knows_each_status() -> None:
    assert (get_args(records.Status), records.FINAL) == (get_args(Status), FINAL)
