"""The list of environments, and packages that are installed while the service runs, through the real HTTP API."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import ApiServer, spec_of

MODULE = """
import math
{first}

class Late:
    def __init__(self, depth, bound=math.nan, how=print, **more): ...
    def make_item(self, seed): return {{}}
    def reset(self, item, seed): ...
    def step(self, state, turn): ...
"""


def install(folder: Path, name: str, *, first: str = "", modules: Path | None = None) -> None:
    """The files that the installation of a package leaves. `modules`: the folder of its source, if the installation is editable."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[marlaas.environments]\n{name} = {name}_module:Late\n")
    if modules:
        modules.mkdir()
        (folder / f"{name}.pth").write_text(f"{modules}\n")
    ((modules or folder) / f"{name}_module.py").write_text(MODULE.format(first=first))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the path, and not there yet."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "late"), *sys.path])
    yield tmp_path / "late"
    for name in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[name]


async def listed(server: ApiServer) -> dict[str, dict[str, Any]]:
    answer = await server.http.get("/v1/environments")
    assert answer.status_code == 200, answer.text
    return {row["id"]: row for row in answer.json()["data"]}


async def create(server: ApiServer, name: str, **args: Any) -> Any:
    hyper = {"max_steps": 1, "batch_size": 1, "group_size": 2}
    method = {"environment": {"name": name, "args": args}, "hyperparameters": hyper}
    return await server.http.post(
        "/v1/fine_tuning/jobs", json={"model": "tiny", "method": {"type": "reinforcement", "reinforcement": method}}
    )


async def test_built_in_environments_are_listed_with_their_arguments(server: ApiServer) -> None:
    found = await listed(server)
    assert list(found) == ["single_turn", "calculator", "search", "python", "openenv"]
    assert found["search"]["args"]["properties"]["top_k"]["default"] == 3
    assert [name for name in found if found[name]["makes_items"]] == ["calculator", "openenv"]
    assert [name for name in found if found[name]["live"]] == ["openenv"]
    assert {(row["package"], row["entry_point"], row["error"]) for row in found.values()} == {(None, None, None)}


async def test_a_package_that_is_installed_while_the_service_runs_is_found(server: ApiServer, folder: Path) -> None:
    # Given a service that has looked for it
    refused = await create(server, "fresh", depth=1)
    assert refused.status_code == 400 and "unknown environment 'fresh'" in refused.text
    assert "fresh" not in await listed(server) and find_spec("fresh_module") is None
    # When it is installed, and another one whose modules are elsewhere
    install(folder, "fresh")
    install(folder, "edited", modules=folder.parent / "source")
    # Then jobs may name them
    found = await listed(server)
    named = {"id": "fresh", "object": "environment", "package": "fresh 1.2", "entry_point": "fresh_module:Late"}
    properties = {"depth": {}, "bound": {"default": None}, "how": {"default": repr(print)}}
    args = {"type": "object", "properties": properties, "required": ["depth"], "additionalProperties": True}
    assert found["fresh"] == named | {"args": args, "makes_items": True, "live": False, "error": None}
    assert found["edited"]["error"] is None
    for name in ("fresh", "edited"):
        assert (await create(server, name, depth=1)).status_code == 200
    # When another version is installed, then it is said that the first is in use
    info = folder / "fresh-1.2.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.2", "Version: 1.3"))
    found = await listed(server)
    assert (found["fresh"]["package"], found["edited"]["error"]) == ("fresh 1.3", None)
    assert found["fresh"]["error"].startswith("1.3 is installed, and 1.2 in use until")
    # And so it is if a module's file is edited, also where it then has a class that the one in use has not
    source = folder.parent / "source" / "edited_module.py"
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1_000_000))
    changed = "the file of edited_module has changed, and the older one is in use until"
    assert (await listed(server))["edited"]["error"].startswith(changed)
    job = (await create(server, "edited", depth=1)).json()["id"]
    assert (await spec_of(server, job)).notes[0].startswith(f"The environment edited: {changed}")
    info = folder / "edited-1.2.dist-info" / "entry_points.txt"
    info.write_text(info.read_text().replace(":Late", ":Later"))
    assert f"has no attribute 'Later'; {changed}" in (await listed(server))["edited"]["error"]


async def test_a_package_that_cannot_be_imported_is_listed_with_the_reason(server: ApiServer, folder: Path) -> None:
    install(folder, "raising", first="raise RuntimeError('no licence')")
    install(folder, "lacking", first="import none_such")
    install(folder, "leaving", first="import sys; sys.exit(3)")
    found = await listed(server)
    assert "RuntimeError: no licence" in found["raising"]["error"] and found["raising"]["args"] is None
    assert "No module named 'none_such'" in found["lacking"]["error"]
    assert "SystemExit: 3" in found["leaving"]["error"]
    assert (await create(server, "leaving")).status_code == 400
    refused = await create(server, "raising")
    assert refused.status_code == 400 and "cannot be loaded: RuntimeError: no licence" in refused.text
    assert (await server.http.get("/v1/environments", headers={"Authorization": "no"})).status_code == 401
