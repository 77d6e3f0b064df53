"""Version 0 of a job that starts from an adapter that its user has uploaded."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from base_model.adapter import WEIGHTS_FILE, load_adapter
from base_model.decoder import Decoder
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
    init = replace(make_init(lora=LORA), file=FILE)
    [(_, update)] = await system.first(init, nothing)
    assert update.failure is None  # pyright: ignore
    made = load_adapter(await system.store.read(AdapterRef("t", "j", 0), PEFT_FILES))
    theirs = adapter_of(5, rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    assert made.spec == LORA and made.names() == theirs.names()
    assert all(bool((made.a[n] == theirs.a[n]).all() and (made.b[n] == theirs.b[n]).all()) for n in made.names())


@pytest.mark.parametrize(
    ("lora", "file", "reason"),
    [
        (LORA, uploaded_path("t", "file-2"), "file-2"),
        (replace(LORA, rank=8), FILE, "rank in adapter_config.json"),
        (replace(LORA, targets=("q_proj",)), FILE, "is missing, or not targeted"),
    ],
)
async def test_what_does_not_fit_fails_the_job_with_a_reason(
    system: System, lora: LoraSpec, file: str, reason: str
) -> None:
    [(_, update)] = await system.first(replace(make_init(lora=lora), file=file), nothing)
    assert update.failure is not None and reason in update.failure.reason  # pyright: ignore
    assert await system.store.manifest(AdapterRef("t", "j", 0)) is None
