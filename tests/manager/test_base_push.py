"""A base model that an operator pushes: its setting, and what reads it before any service does."""

import json
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.settings import TINY, parse_base_models
from manager_service.launcher.memory_shares import _read  # pyright: ignore[reportPrivateUsage]
from manager_service.launcher.own_store import OwnStore
from tests.manager.test_cli import run


def test_what_is_pushed_can_be_planned_and_shared_out_as_a_folder_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = run("base", "push", "q", str(TINY), "--data", str(tmp_path)).strip()
    name, where = setting.removeprefix("MARLAAS_BASE_MODELS=").split("=")
    assert (
        name == "q"
        and setting in json.loads(run("base", "push", "q", str(TINY), "--data", str(tmp_path), "--json"))["setting"]
    )
    monkeypatch.setenv("MARLAAS_DATA_DIR", str(tmp_path))
    plans = [json.loads(run("plan", each, "--gpu", "24GB", "--json")) for each in (where, str(TINY))]
    assert plans[0] == plans[1]
    environment = OwnStore({"MARLAAS_BASE_MODELS": setting.partition("=")[2]}, tmp_path, print).with_bases_here()
    assert Path(parse_base_models(environment["MARLAAS_BASE_MODELS"])["q"]).parent == tmp_path / "cache" / "bases"
    assert _read(environment)["q"].shape.num_weights == 822_656


def test_a_name_that_no_setting_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="letters, digits"):
        run("base", "push", "a,b", str(TINY), "--data", str(tmp_path))
