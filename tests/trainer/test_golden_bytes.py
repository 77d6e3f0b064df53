"""Each loss trains the recorded bytes in deterministic mode, so that no change of the code changes them unseen.

Bytes depend on the machine, so they are kept by fingerprint in `data/golden_bytes.json`; where none are known the test is skipped
and says what it found. `MARLAAS_TEST_RECORD=1` records those of the machine at hand.
"""

import json
import os
from pathlib import Path
from typing import get_args

import pytest

from base_model.kernels import choose
from common.messages import LoraSpec, LossName, LossSpec
from tests.support.trainer_cases import TINY, load_tiny, make_init, make_rows, make_step, nothing
from tests.trainer.test_trainer_determinism import digest
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.selftest import KERNELS, selftest
from trainer_service.training import Trainer

pytestmark = pytest.mark.exact
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden_bytes.json"
NUM_STEPS = 3


def trained(trainer: Trainer, loss: LossName) -> str:
    """sha256 of adapter and moments after some steps of one job."""
    state = trainer.init(make_init(lora=LoraSpec(rank=5)))
    for version in range(NUM_STEPS):
        rows = make_rows(version, num_groups=5, version=version)
        step = make_step(version, rows, loss=LossSpec(name=loss, kl_coef=0.05 * (version % 2)))
        state = trainer.step(step, state, nothing).state
    return digest(state)


def test_every_loss_trains_the_bytes_that_were_recorded() -> None:
    trainer = Trainer(DecoderBackbone(load_tiny()), deterministic=True)
    machine = choose("trainer_service.selftest", TINY, KERNELS).fingerprint(lambda: selftest(trainer))[:16]
    found = {loss: trained(trainer, loss) for loss in get_args(LossName)}
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("MARLAAS_TEST_RECORD"):
        GOLDEN.write_text(json.dumps(golden | {machine: found}, indent=2, sort_keys=True) + "\n")
    elif machine not in golden:
        pytest.skip(f"no golden bytes are known for the fingerprint {machine}; found {json.dumps(found)}")
    else:
        assert found == golden[machine]
