"""`marlaas up` gives each worker its GPUs, by what nvidia-smi finds, and says so; also where one stands beside training on the CPU.

nvidia-smi is a script that answers as the real one does.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.settings import TINY
from harness.bases import QWEN3_06B
from manager_service.launcher.devices import arrange
from manager_service.launcher.gpus import LocalWorker
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand
from tests.manager.test_supervisor import API, python

ON_GPU = {"MARLAAS_ROLLOUT_DEVICE": "cuda", "MARLAAS_TRAINER_DEVICE": "cuda"}


def with_gpus(tmp_path: Path, number: int, *, free_mib: int = 24_100, **settings: str) -> dict[str, str]:
    """An environment with a nvidia-smi that finds so many, with so much of each one's memory free."""
    rows = "".join(f"echo '{index}, GPU-{index}aaa-bbb, 24564, {free_mib}'\n" for index in range(number))
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{rows}")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return {"PATH": path, **ON_GPU, **{f"MARLAAS_{name}": value for name, value in settings.items()}}


def workers(rollout: int, trainer: int) -> list[LocalWorker]:
    counts = {"rollout": rollout, "trainer": trainer}
    return [LocalWorker(f"{service}-{i}", service, "tiny") for service, count in counts.items() for i in range(count)]


def seen(environment: dict[str, str], rollout: int = 1, trainer: int = 1) -> dict[str, str]:
    """The GPUs that each worker sees."""
    arranged = arrange(environment, workers(rollout, trainer))
    return {name: own["CUDA_VISIBLE_DEVICES"] for name, own in arranged.of_workers.items()}


# ---- without a choice -----------------------------------------------------------------------------------------------


def test_one_gpu_is_everybodys_as_it_is(tmp_path: Path) -> None:
    assert seen(with_gpus(tmp_path, 1), rollout=2) == {}


def test_rollouts_have_the_first_gpus_and_trainers_the_next(tmp_path: Path) -> None:
    two = arrange(with_gpus(tmp_path, 2), workers(1, 1))
    assert two.of_workers["rollout-0"] == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert two.of_workers["trainer-0"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert two.lines[0].startswith("GPUs: rollout-0 has 0, trainer-0 has 1;") and "MARLAAS_DEVICES" in two.lines[0]
    eight = with_gpus(tmp_path, 8, ENGINE="vllm", VLLM_TENSOR_PARALLEL="2", TRAINER_RANKS="4")
    assert seen(eight, rollout=2) == {"rollout-0": "0,1", "rollout-1": "2,3", "trainer-0": "4,5,6,7"}
    idle = arrange(with_gpus(tmp_path, 8), workers(1, 1)).lines[0]
    assert "6 of 8 are idle" in idle


def test_where_gpus_are_too_few_trainers_have_the_last_and_rollouts_share_the_others(tmp_path: Path) -> None:
    assert seen(with_gpus(tmp_path, 2), rollout=2) == {"rollout-0": "0", "rollout-1": "0", "trainer-0": "1"}
    assert seen(with_gpus(tmp_path, 2, TRAINER_RANKS="2")) == {"rollout-0": "0", "trainer-0": "0,1"}
    with pytest.raises(InvalidInput, match="a trainer worker takes 4 GPUs, and nvidia-smi finds 2"):
        seen(with_gpus(tmp_path, 2, TRAINER_RANKS="4"))


def test_a_service_on_the_cpu_has_no_gpu_and_one_that_names_its_own_keeps_it(tmp_path: Path) -> None:
    assert seen(with_gpus(tmp_path, 2, TRAINER_DEVICE="cpu"), rollout=2) == {"rollout-0": "0", "rollout-1": "1"}
    assert seen(with_gpus(tmp_path, 2, TRAINER_DEVICE="cuda:1")) == {}


def test_the_operators_own_visible_gpus_are_those_that_are_shared(tmp_path: Path) -> None:
    assert seen(with_gpus(tmp_path, 8) | {"CUDA_VISIBLE_DEVICES": "5,GPU-2aaa"}) == {"rollout-0": "5", "trainer-0": "2"}


def test_what_others_hold_of_a_gpu_is_said_and_not_given_away(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text()) | QWEN3_06B | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"MARLAAS_BASE_MODELS": f"tiny={tmp_path}", "MARLAAS_ENGINE": "vllm"}
    idle, busy = (arrange(with_gpus(tmp_path, 1, free_mib=free) | asked, workers(1, 1)) for free in (24_100, 14_564))
    assert not any("others hold" in line for line in idle.lines)
    assert "GPU 0: others hold 10.5 of its 25.8 GB" in busy.lines[0] and "15.3 GB of GPU 0" in busy.lines[1]
    taken = [int(each.settings["MARLAAS_ROLLOUT_KV_BYTES"]) for each in (idle, busy)]
    assert 0 < taken[1] < taken[0] - 5e9
    fractions = [float(each.settings["MARLAAS_TRAINER_MEMORY_FRACTION"]) for each in (idle, busy)]
    assert fractions[1] * 25.8e9 < 15.3e9 - taken[1], "a fraction is of the whole memory"


def test_without_nvidia_smi_all_is_as_it_was(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    environment = with_gpus(tmp_path, 2)
    program.write_text("#!/bin/sh\necho 'no driver'; exit 9\n")
    assert seen(environment) == {}
    assert seen(ON_GPU | {"PATH": str(tmp_path)}) == {}


# ---- MARLAAS_DEVICES ------------------------------------------------------------------------------------------------


def test_workers_take_the_gpus_that_are_named_in_order(tmp_path: Path) -> None:
    chosen = with_gpus(tmp_path, 8, DEVICES="rollout:4-7,1,trainer:0", ENGINE="vllm", VLLM_TENSOR_PARALLEL="2")
    assert seen(chosen, rollout=2) == {"rollout-0": "4,5", "rollout-1": "6,7", "trainer-0": "0"}
    one = with_gpus(tmp_path, 1, DEVICES="rollout:0,trainer:0")
    assert seen(one) == {"rollout-0": "0", "trainer-0": "0"}


def test_a_service_with_gpus_computes_on_them(tmp_path: Path) -> None:
    chosen = {"PATH": with_gpus(tmp_path, 2)["PATH"], "MARLAAS_DEVICES": "trainer:1"}
    arranged = arrange(chosen, workers(1, 1))
    assert arranged.settings == {"MARLAAS_TRAINER_DEVICE": "cuda"} and arranged.of_workers.keys() == {"trainer-0"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("rollout:0-1", r"gives trainer 0 GPUs, and 1 workers of 1 take 1"),
        ("rollout:0,trainer:1-4", r"1-4 is not there: nvidia-smi finds 2 GPUs"),
        ("rollout:1-0,trainer:0", r"'1-0' is neither a number nor a range"),
        ("rollout:x,trainer:0", r"'x' is neither"),
        ("0,1", r"'0' names none of rollout and trainer; write rollout:0-3,trainer:4-7"),
        ("env:0", r"'env:0' names none"),
        ("rollout:0-1,1,trainer:0", r"rollout has a GPU twice"),
        ("rollout:,trainer:0", r"'' is neither"),
    ],
)
def test_what_makes_no_sense_is_said(tmp_path: Path, said: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^MARLAAS_DEVICES.*{why}"):
        seen(with_gpus(tmp_path, 2, DEVICES=said))


def test_gpus_of_a_service_that_is_told_to_compute_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="MARLAAS_TRAINER_DEVICE=cpu: leave one of them out"):
        seen(with_gpus(tmp_path, 2, DEVICES="rollout:0,trainer:1", TRAINER_DEVICE="cpu"))


# ---- children -------------------------------------------------------------------------------------------------------

SAYS = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(600)"


async def test_each_child_sees_its_own_gpus_alone(tmp_path: Path) -> None:
    names = ("rollout-0", "rollout-1", "trainer-0", "env-0")
    services = [ServiceCommand("manager", python(API)), *(ServiceCommand(name, python(SAYS)) for name in names)]
    heard: list[str] = []
    environment = {**with_gpus(tmp_path, 8), "PYTHONPATH": os.pathsep.join(sys.path)}
    cluster = LocalCluster(
        data_dir=tmp_path / "data", services=lambda counts, env: services, environment=environment, notify=heard.append
    )
    async with cluster:
        logs = {name: cluster.log_file(name) for name in names}
        while not all(log.exists() and log.read_text() for log in logs.values()):
            await asyncio.sleep(0.02)
    assert {name: log.read_text().strip() for name, log in logs.items()} == {
        "rollout-0": "0",
        "rollout-1": "1",
        "trainer-0": "2",
        "env-0": "None",
    }
    assert any(line.startswith("GPUs: rollout-0 has 0, rollout-1 has 1, trainer-0 has 2;") for line in heard)


# ---- an idle GPU ----------------------------------------------------------------------------------------------------
