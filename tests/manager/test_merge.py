"""Merged weights beside PEFT's, and adapters that fit no base."""

import io
import json
import shutil
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import InvalidInput
from common.models.base_digest import base_digest
from common.settings import TINY, Settings
from manager_service.launcher.commands import merge as merging
from manager_service.launcher.commands.merge import base_of, merge
from tests.manager.test_cli import FakeApi, api, run
from tests.support.rollout_cases import files_of

__all__ = ["api"]


def adapter(folder: Path, **options: Any) -> Path:
    folder.mkdir()
    for name, content in files_of(5, **{"rank": 6, "alpha": 24.0, **options}).items():
        (folder / name).write_bytes(content)
    return folder


def by_peft(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel  # imported here: it takes seconds
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload().state_dict()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_shards(folder: Path, dtype: torch.dtype) -> Path:
    """The base model in another dtype, in several files."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="400KB")
    return folder


def test_merged_weights_are_pefts(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    names = merge(folder, TINY, tmp_path / "merged")
    merged, expected, before = tensors_in(tmp_path / "merged"), by_peft(TINY, folder), tensors_in(TINY)
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= set(names)
    assert merged.keys() == before.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    changed = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_an_adapter_of_a_twin_is_not_merged(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    for digest, fault in ((base_digest(TINY), ""), ("t-1", "the adapter was trained on other files .digest t-1.")):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_digest": digest}))
        with pytest.raises(InvalidInput, match=fault) if fault else nullcontext():
            merge(folder, TINY, tmp_path / f"merged with {digest}")
    assert [path.name for path in tmp_path.glob("merged*")] == [f"merged with {base_digest(TINY)}"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_half_precision_and_several_files_keeps_its_form(tmp_path: Path, dtype: torch.dtype) -> None:
    base, folder = in_shards(tmp_path / "base", dtype), adapter(tmp_path / "adapter", targets=("q_proj", "up_proj"))
    names = merge(folder, base, tmp_path / "merged")
    merged, expected, factors = tensors_in(tmp_path / "merged"), by_peft(base, folder), tensors_in(folder)
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    for name, before in tensors_in(base).items():
        assert merged[name].dtype == dtype
        a = factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        if a is None:
            assert torch.equal(merged[name], before)
            continue
        b = factors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
        torch.testing.assert_close(merged[name], (before.float() + 4 * (b @ a)).to(dtype), rtol=2**-7, atol=0)
        torch.testing.assert_close(merged[name].float(), expected[name].float(), rtol=2**-6, atol=2**-9)


def refused(tmp_path: Path, folder: Path, base: Path = TINY) -> str:
    with pytest.raises(InvalidInput) as error:
        merge(folder, base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists(), "nothing is left"
    return str(error.value)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_merge_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(merging, "_merge", failing)
    with pytest.raises((InvalidInput, KeyboardInterrupt), match=r"merged: \[Errno 28\] No space|^$"):
        merge(adapter(tmp_path / "adapter"), TINY, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_that_does_not_fit_is_refused_by_layer(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    weights = load_file(base / "model.safetensors")
    up_proj = "model.layers.0.mlp.up_proj"
    deeper = {name.replace(".3.", ".4."): tensor.clone() for name, tensor in weights.items() if ".layers.3." in name}
    for changed, complaint in (
        (
            {name: tensor for name, tensor in weights.items() if ".layers.3." not in name},
            "model.layers.3.mlp.down_proj is in only one",
        ),
        (weights | deeper, "model.layers.4.mlp.down_proj is in only one"),
        (
            weights | {f"{up_proj}.weight": torch.zeros(384, 64)},
            f"{up_proj} is [384, 64] of torch.float32, and the factors make [384, 128]",
        ),
        (
            weights | {f"{up_proj}.weight": torch.zeros(384, 128, dtype=torch.int8)},
            f"{up_proj} is [384, 128] of torch.int8",
        ),
    ):
        save_file(changed, base / "model.safetensors")
        assert complaint in refused(tmp_path, folder, base)
    save_file({name: tensor.half() for name, tensor in weights.items()}, base / "model.safetensors")
    huge = adapter(tmp_path / "huge", size=1e7)
    assert "no finite numbers of dtype torch.float16" in refused(tmp_path, huge, base)
    (base / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:-10])
    assert "deserializing header" in refused(tmp_path, folder, base)
    (base / "model.safetensors").unlink()
    assert "has no *.safetensors" in refused(tmp_path, folder, base)


def test_the_base_is_found_by_what_the_adapter_says(tmp_path: Path) -> None:
    tiny = {"base_model_name_or_path": "tiny"}
    assert base_of(tiny, None, Settings()) == TINY
    assert base_of(tiny, str(tmp_path), Settings()) == tmp_path
    with pytest.raises(InvalidInput, match="where is the base model 'q'"):
        base_of({"base_model_name_or_path": "q"}, None, Settings())


def test_pull_merges_what_it_downloads(api: type[FakeApi], tmp_path: Path) -> None:
    buffer, to = io.BytesIO(), tmp_path / "merged"
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files_of(5).items():
            archive.writestr(name, content)
    api.answers = {("GET", "/v1/fine_tuning/jobs/ftjob-1/checkpoints/3/content"): buffer.getvalue()}
    words = ("pull", "ftjob-1", "--version", "3", "--merged", str(to))
    assert "model.safetensors" in json.loads(run(*words, "--json"))["files"]
    assert sorted(file.name for file in to.iterdir()) == sorted(
        json.loads(run(*words[:-1], str(tmp_path / "b"), "--json"))["files"]
    )
    with pytest.raises(InvalidInput, match="there is something already"):
        run(*words)
    with pytest.raises(InvalidInput, match="--base goes with --merged"):
        run("pull", "ftjob-1", "--version", "3", "--base", str(TINY))
