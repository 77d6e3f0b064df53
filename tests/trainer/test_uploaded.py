"""Version 0 of a job that starts from an adapter that its user has uploaded."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from base_model.adapter import WEIGHTS_FILE, load_adapter
from base_model.decoder import Decoder
from common.models.base_digest import BaseIdentity
from common.store.adapters import PEFT_FILES
from common.wire.messages import AdapterRef, LoraSpec
from manager_service.records.file_records import uploaded_path
from tests.support.rollout_cases import adapter_of, files_of
from tests.support.trainer_cases import load_tiny, make_init, nothing
from tests.trainer.test_run_handler import System

FILE = uploaded_path("t", "file-1")
LORA = LoraSpec(4, 8.0, ("q_proj", "up_proj"))


def test_operators_are_told_to_let_trainers_read_it_and_no_files_of_items() -> None:
    told = Path("docs/operations.md").read_text()
    trainer = next(line.split("|")[2] for line in told.splitlines() if line.startswith("| trainer | `"))
    assert f"`{FILE.partition('/')[0]}/*`" in trainer and "`files/*`" not in trainer


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_tiny()


@pytest.fixture
async def system(decoder: Decoder, tmp_path: Path) -> System:
    system = System(decoder, tmp_path)
    files = files_of(5, rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    await system.objects.write(FILE, files[WEIGHTS_FILE])
    return system


async def test_version_0_is_the_adapter_in_the_file(system: System) -> None:
    system.store.base = BaseIdentity("tiny", "t-1")
    init = replace(make_init(lora=LORA), file=FILE, base_digest="t-1")
    [(_, update)] = await system.first(init, nothing)
    assert update.failure is None  # pyright: ignore
    made = load_adapter(await system.store.read(AdapterRef("t", "j", 0), PEFT_FILES))
    theirs = adapter_of(5, rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    assert made.spec == LORA and made.names() == theirs.names()
    assert all(bool((made.a[n] == theirs.a[n]).all() and (made.b[n] == theirs.b[n]).all()) for n in made.names())


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        ({"file": uploaded_path("t", "file-2")}, "file-2"),
        ({"lora": replace(LORA, rank=8)}, "rank in adapter_config.json"),
        ({"lora": replace(LORA, targets=("q_proj",))}, "is missing, or not targeted"),
        ({"base_digest": "t-2"}, "was trained on other files (digest t-2) than those of 'tiny' here (t-1)"),
    ],
)
async def test_what_does_not_fit_fails_the_job_with_a_reason(system: System, init: dict[str, Any], reason: str) -> None:
    system.store.base = BaseIdentity("tiny", "t-1")
    [(_, update)] = await system.first(replace(make_init(lora=LORA), **{"file": FILE, **init}), nothing)
    assert update.failure is not None and reason in update.failure.reason  # pyright: ignore
    assert await system.store.manifest(AdapterRef("t", "j", 0)) is None
