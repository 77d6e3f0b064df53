"""The client's package beside the services': one version, the same needs, and the API's own records."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from manager_service.api import schemas
from manager_service.records import FINAL, Status
from marlaas_client import records

ROOT = Path(__file__).resolve().parents[2]


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def test_the_packages_have_one_version_and_agree_on_what_both_need() -> None:
    client, services = project("marlaas_client"), project(".")
    assert client["project"]["version"] == services["project"]["version"]
    assert set(client["project"]["dependencies"]) <= set(services["project"]["dependencies"])
    assert client["project"]["requires-python"] == services["project"]["requires-python"]


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
