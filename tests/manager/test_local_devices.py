"""`marlaas up` says so where a GPU stands beside training on the CPU."""

from pathlib import Path

from manager_service.local.devices import idle_gpu


def test_training_on_the_cpu_beside_a_gpu_is_said(tmp_path: Path) -> None:
    assert idle_gpu({}, tmp_path) is None
    (tmp_path / "nvidiactl").touch()
    assert idle_gpu({}, tmp_path) is None, "a driver without a device"
    (tmp_path / "nvidia0").touch()
    assert "MARLAAS_TRAINER_DEVICE=cuda" in (idle_gpu({}, tmp_path) or "")
    assert idle_gpu({"MARLAAS_TRAINER_DEVICE": "cuda"}, tmp_path) is None
