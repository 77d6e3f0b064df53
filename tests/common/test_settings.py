"""Settings: one list of all names, and a misspelt one is refused by every service."""

import ast
import inspect
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import REFUSED, InvalidInput
from common.settings import KNOWN, TINY, Settings, explained, parse_base_models, refuse_unknown
from env_service.settings import EnvSettings
from manager_service.launcher.settings import LocalSettings
from manager_service.settings import ManagerSettings
from marlaas_client.place import ClientSettings
from rollout_service.settings import RolloutSettings
from tests.support.forked import ended
from trainer_service.settings import TrainerSettings

ROOT = Path(__file__).resolve().parents[2]
ALL = (Settings, ManagerSettings, EnvSettings, RolloutSettings, TrainerSettings, LocalSettings, ClientSettings)


def docstrings(settings: type) -> dict[str, str]:
    """The docstring of each field that has one."""
    [body] = [node.body for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: below.value.value
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def test_the_known_names_are_the_fields_of_all_services() -> None:
    assert {name for settings in ALL for name in settings.model_fields} == KNOWN


def test_no_two_services_mean_different_things_by_one_name() -> None:
    # What two services need stands in the common part; a class that cannot inherit it repeats its type, default and docstring.
    meanings: dict[str, list[str]] = {}
    for settings in ALL:
        told = docstrings(settings)
        for name in settings.model_fields.keys() & settings.__annotations__.keys():
            meanings.setdefault(name, []).append(f"{settings.model_fields[name]!r} {told.get(name)}")
    for name, found in meanings.items():
        assert len(found) == 1 or (name in Settings.model_fields and len(set(found)) == 1), name


def test_every_kind_of_settings_is_in_this_test() -> None:
    assert set(Settings.__subclasses__()) <= set(ALL)


@pytest.mark.parametrize(
    ("name", "told"),
    [("MARLAAS_ROLOUT_SLOTS", r"; did you mean MARLAAS_ROLLOUT_SLOTS\?$"), ("MARLAAS_ZZZ", "$")],
)
def test_an_unknown_variable_is_refused_with_the_nearest_known_one_if_one_is_near(
    monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setenv(name, "8")
    with pytest.raises(InvalidInput, match=name + told):
        refuse_unknown()


def test_known_variables_of_other_services_foreign_ones_and_those_of_tests_are_let_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MARLAAS_TRAINER_THREADS", "marlaas_env_slots", "MARLAAS_API_KEY", "MARLAAS_TEST_S3", "OTHER_THING"):
        monkeypatch.setenv(name, "1")
    refuse_unknown()


@pytest.mark.parametrize("module", ["env_service", "manager_service"])
async def test_a_process_with_a_misspelt_setting_does_not_start_and_says_so_in_one_line(
    module: str, tmp_path: Path
) -> None:
    status, (line,) = await ended(module, tmp_path / "log", MARLAAS_REDIS_URI="redis://127.0.0.1:1/0")
    assert status == REFUSED and "did you mean MARLAAS_REDIS_URL?" in line


def test_the_command_line_refuses_a_misspelt_setting_in_one_line() -> None:
    environment = {**os.environ, "MARLAAS_REDIS_URI": "redis://127.0.0.1:1/0"}
    command = [sys.executable, "-m", "manager_service.launcher.commands.main", "jobs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "did you mean MARLAAS_REDIS_URL?" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_wrong_values_are_told_by_the_names_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLAAS_ENGINE", "vlm")
    monkeypatch.setenv("MARLAAS_VLLM_MAX_LORA_RANK", "24")
    with pytest.raises(ValueError) as caught:
        RolloutSettings()
    one, other = explained(caught.value).split("; ")
    assert one == "MARLAAS_ENGINE=vlm: Input should be 'torch' or 'vllm'"
    assert other.startswith("MARLAAS_VLLM_MAX_LORA_RANK=24: vLLM takes 1, 8,")


def test_sizes_may_have_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (("20GB", 20 * 10**9), ("16GiB", 16 << 30), ("1.5 MiB", 3 << 19), ("4096", 4096)):
        monkeypatch.setenv("MARLAAS_MAX_STORED_BYTES", text)
        assert ManagerSettings().max_stored_bytes == size
    for text in ("much", "-1", "0", "20,000,000,000", "1,5GB", "1.2.3GB", "1e400GB", "9" * 400):
        monkeypatch.setenv("MARLAAS_MAX_STORED_BYTES", text)
        with pytest.raises(ValueError, match="max_stored_bytes"):
            ManagerSettings()


def test_every_setting_of_bytes_may_have_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ALL:
        for name in [name for name in settings.model_fields if name.endswith("_bytes")]:
            monkeypatch.setenv(f"MARLAAS_{name.upper()}", "4GiB")
            assert getattr(settings(), name) == 4 << 30


def test_a_hub_that_cannot_be_reached_ends_a_service_with_one_line(tmp_path: Path) -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    own = {"MARLAAS_BASE_MODELS": "qwen=Qwen/Qwen3-0.6B", "MARLAAS_DATA_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "manager_service"],
        cwd=ROOT,
        env={**os.environ, **hub, **own},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == REFUSED
    assert done.stderr.splitlines()[-1].startswith("manager: base model: Qwen/Qwen3-0.6B cannot be had from the hub (")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("service", "name"), [("rollout", "tpu"), ("trainer", "cuda:99")])
async def test_a_device_that_is_not_there_ends_a_worker_with_one_line(service: str, name: str, tmp_path: Path) -> None:
    own = {(setting := f"MARLAAS_{service.upper()}_DEVICE"): name, "MARLAAS_DATA_DIR": str(tmp_path)}
    status, lines = await ended(f"{service}_service", tmp_path / "log", **own)
    assert status == REFUSED
    assert lines[-1].startswith(f"{service}: {setting}={name}: torch finds no such device here")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("missing", ["chat_template.jinja", "tokenizer.json"])
async def test_a_base_model_without_a_text_file_ends_a_worker_as_a_wrong_setting_does(
    missing: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", missing))
    own = {"MARLAAS_BASE_MODELS": f"q={folder}", "MARLAAS_DATA_DIR": str(tmp_path)}
    status, (line,) = await ended("env_service", tmp_path / "log", **own)
    assert status == REFUSED
    assert line.startswith(f"env: the base model at {folder} has no ") and missing in line


async def test_memory_for_no_row_ends_a_rollout_worker_as_a_wrong_setting_does(tmp_path: Path) -> None:
    own = {"MARLAAS_ROLLOUT_KV_BYTES": "1000", "MARLAAS_DATA_DIR": str(tmp_path)}
    status, lines = await ended("rollout_service", tmp_path / "log", **own)
    assert (status, lines[-1].rpartition("; ")[2]) == (REFUSED, "raise MARLAAS_ROLLOUT_KV_BYTES")


@pytest.mark.parametrize(
    "wrong", ["small", "a b=x", "a{=x", "=x", "a=", " , ", "a=store:q", "a=store:q@0a1b", "a=x,a=y"]
)
def test_base_models_that_cannot_be_served_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        parse_base_models(wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_rollout_and_trainer_choose_one_dtype_for_one_kind_of_device(device: str) -> None:
    chosen = {RolloutSettings(rollout_device=device).dtype, TrainerSettings(trainer_device=device).dtype}
    assert chosen == {"float32" if device == "cpu" else "bfloat16"}
    assert TrainerSettings(trainer_device=device, trainer_dtype="float32").dtype == "float32"
    assert TrainerSettings(trainer_device=device, trainer_dtype="bfloat16").dtype == "bfloat16"


def test_a_gpu_has_larger_micro_batches_unless_somebody_has_said_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (TrainerSettings().most_tokens, TrainerSettings(trainer_device="cuda").most_tokens) == (2048, 16_384)
    monkeypatch.setenv("MARLAAS_TRAINER_MICRO_BATCH_TOKENS", "4096")
    assert TrainerSettings(trainer_device="cuda:1").most_tokens == 4096


def test_adapters_come_through_peers_unless_the_store_is_a_folder_or_as_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [RolloutSettings(store_url=url).relays for url in ("", "file:///x", "s3://b/x")] == [False, False, True]
    monkeypatch.setenv("MARLAAS_PEERS", "0")
    assert not RolloutSettings(store_url="s3://b/x").relays
    with pytest.raises(ValueError, match="leave MARLAAS_PEERS unset"):
        RolloutSettings(convoys=2)
    assert RolloutSettings(peers=True, data_dir=Path("/d")).node_dir == Path("/d/cache")


def test_vllm_on_a_gpu_has_defaults_of_its_own_and_what_is_set_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    here, gpu = RolloutSettings(engine="vllm"), RolloutSettings(engine="vllm", rollout_device="cuda")
    assert (here.rollout_slots, gpu.rollout_slots) == (128, 256)
    assert (here.vllm_max_loras, gpu.vllm_max_loras) == (8, 32)
    assert here.rollout_idle_adapter_bytes < gpu.rollout_idle_adapter_bytes
    monkeypatch.setenv("MARLAAS_ROLLOUT_SLOTS", "32")
    assert RolloutSettings(engine="vllm", rollout_device="cuda").rollout_slots == 32


@pytest.mark.parametrize(
    ("slots", "deterministic", "shared", "chat", "engine"),
    [
        (128, False, 128, 16, 272),
        (1, False, 1, 1, 3),
        (128, True, 112, 16, 128),
        (2, True, 1, 1, 2),
        (1, True, 1, 0, 1),
    ],
)
def test_chats_have_places_beside_the_slots_and_out_of_them_where_bits_count(
    slots: int, deterministic: bool, shared: int, chat: int, engine: int
) -> None:
    found = RolloutSettings(rollout_slots=slots, deterministic=deterministic)
    assert (found.shared_slots, found.chat_slots, found.engine_slots) == (shared, chat, engine)


def test_a_password_in_the_redis_url_never_prints() -> None:
    assert "secret" not in repr(Settings(redis_url="redis://:secret@127.0.0.1/0"))
