"""Compiled parts of the base model: the same training, and a clear refusal where they cannot be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import InvalidInput
from tests.support.trainer_cases import load_shallow, make_init, make_rows, make_step, measured, nothing
from trainer_service.__main__ import load_trainer
from trainer_service.backbone.sequences import DecoderBackbone, checkpointed, compile_parts
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer


def test_deterministic_mode_does_without() -> None:
    with pytest.raises(InvalidInput, match="trainer_compile=false"):
        load_trainer(TrainerSettings(deterministic=True, trainer_compile=True))


@pytest.fixture
def compiler() -> Iterator[Any]:
    """The settings of torch's compiler, which knows nothing yet."""
    from torch._inductor import config  # here: it takes a second

    torch.compiler.reset()
    # Other processes would compile, and try the processor's instructions, and each import torch anew.
    with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        yield config
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
@pytest.mark.usefixtures("compiler")
def test_compiled_parts_train_alike_and_keep_less() -> None:
    decoder = load_shallow()
    compile_parts(decoder)
    plain, compiled = Trainer(DecoderBackbone(load_shallow())), Trainer(DecoderBackbone(decoder))
    state = plain.init(make_init())
    step = make_step(0, make_rows())
    expected = plain.step(step, state, nothing)
    for trainer in (compiled, Trainer(DecoderBackbone(decoder, checkpointed))):
        found = trainer.step(step, state, nothing)
        torch.testing.assert_close(found.state.values_P, expected.state.values_P, atol=2e-5, rtol=1e-3)
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert measured(compiled, 1 << 30).bytes_per_token < measured(plain, 1 << 30).bytes_per_token


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_without_a_compiler_the_worker_says_what_to_do(
    tmp_path: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    refused = pytest.raises(
        InvalidInput, match=r"TRAINER_COMPILE: torch cannot compile here .* install a C\+\+ compiler"
    )
    with compiler.patch({"cpp.cxx": (str(tmp_path / "none"),)}), refused:
        load_trainer(TrainerSettings(trainer_compile=True))
