"""Each loss trains the recorded bytes in deterministic mode, so that no change of the code changes them unseen.

Bytes depend on the machine, so they are kept by fingerprint in `data/golden_bytes.json`. Where none are known, two fresh processes
must find the same ones, and a warning shows them. `MARLAAS_TEST_RECORD=1` records those of the machine at hand.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_args

import pytest

from base_model.kernels import choose
from common.wire.messages import LoraSpec, LossName, LossSpec
from tests.support.trainer_cases import TINY, load_tiny, make_init, make_rows, make_step, nothing
from tests.trainer.test_trainer_determinism import digest
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.selftest import KERNELS, selftest
from trainer_service.training import Trainer

pytestmark = pytest.mark.exact
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden_bytes.json"
NUM_STEPS = 3


def trained(trainer: Trainer, loss: LossName) -> str:
    """sha256 of adapter and moments after some steps of one job."""
    state = trainer.init(make_init(lora=LoraSpec(rank=5)))
    for version in range(NUM_STEPS):
        rows = make_rows(version, num_groups=5, version=version)
        step = make_step(version, rows, loss=LossSpec(name=loss, kl_coef=0.05 * (version % 2)))
        state = trainer.step(step, state, nothing).state
    return digest(state)


def of_this_process() -> dict[str, dict[str, str]]:
    """The fingerprint of the machine -> each loss's bytes."""
    trainer = Trainer(DecoderBackbone(load_tiny()), deterministic=True)
    machine = choose("trainer_service.selftest", TINY, KERNELS).fingerprint(lambda: selftest(trainer))[:16]
    return {machine: {loss: trained(trainer, loss) for loss in get_args(LossName)}}


def of_a_fresh_process() -> dict[str, dict[str, str]]:
    code = f"import json; from {__name__} import of_this_process; print('found', json.dumps(of_this_process()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.rpartition("found ")[2])


@pytest.mark.filterwarnings("default:no golden bytes")
def test_every_loss_trains_the_bytes_that_were_recorded() -> None:
    found = of_this_process()
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("MARLAAS_TEST_RECORD"):
        GOLDEN.write_text(json.dumps(golden | found, indent=2, sort_keys=True) + "\n")
    elif found.keys() <= golden.keys():
        assert found.items() <= golden.items()
    else:
        assert [of_a_fresh_process() for _ in range(2)] == [found] * 2
        warnings.warn(
            f"no golden bytes are known for this machine's fingerprint; to be added: {json.dumps(found)}", stacklevel=1
        )
