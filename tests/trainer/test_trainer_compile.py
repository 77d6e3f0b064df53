"""Compiled parts of the base model: the same training, and a clear refusal where they cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import InvalidInput
from tests.support.trainer_cases import load_tiny, make_init, make_rows, make_step, measured, nothing
from trainer_service.__main__ import load_trainer
from trainer_service.backbone.sequences import DecoderBackbone, checkpointed, compile_parts
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]


def test_deterministic_mode_does_without() -> None:
    with pytest.raises(InvalidInput, match="trainer_compile=false"):
        load_trainer(TrainerSettings(deterministic=True, trainer_compile=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
def test_compiled_parts_train_alike_and_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # other processes would import torch anew
    decoder = load_tiny()
    compile_parts(decoder)
    plain, compiled = Trainer(DecoderBackbone(load_tiny())), Trainer(DecoderBackbone(decoder))
    state = plain.init(make_init())
    step = make_step(0, make_rows())
    expected = plain.step(step, state, nothing)
    for trainer in (compiled, Trainer(DecoderBackbone(decoder, checkpointed))):
        found = trainer.step(step, state, nothing)
        torch.testing.assert_close(found.state.values_P, expected.state.values_P, atol=2e-5, rtol=1e-3)
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert measured(compiled, 1 << 30).bytes_per_token < measured(plain, 1 << 30).bytes_per_token


@pytest.mark.slow
def test_without_a_compiler_the_worker_says_what_to_do(tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": str(tmp_path / "none"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "MARLAAS_TRAINER_COMPILE": "true",
    }
    code = (
        "from trainer_service.__main__ import load_trainer\n"
        "from trainer_service.settings import TrainerSettings\n"
        "load_trainer(TrainerSettings())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode
    assert "InvalidInput: MARLAAS_TRAINER_COMPILE: torch cannot compile here" in ended.stderr
    assert "install a C++ compiler" in ended.stderr
