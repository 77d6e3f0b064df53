"""A pulled adapter and PEFT."""

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

from common.settings import TINY
from manager_service.cli.pull import CONFIG, name_base, unpack
from tests.support.rollout_cases import files_of


def test_a_pulled_adapter_loads_without_a_word_about_its_base_model(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM  # imported here: it takes seconds

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files_of(5, rank=6, alpha=24.0).items():
            archive.writestr(name, content)
    unpack(buffer.getvalue(), tmp_path)
    name_base(tmp_path / CONFIG, "tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path))
    assert model.peft_config["default"].base_model_name_or_path == str(TINY)
    assert model.get_base_model().config.hidden_size == 128
