"""A base model with random weights, of any size: what a real one takes, without a download.

python -m harness.bases FOLDER      makes one of the shape of Qwen3-0.6B; --small: one of its family that takes seconds
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from common.settings import TINY

QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
"""The sizes of Qwen3-0.6B: 596 M weights, with tied embeddings."""
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
"""The same family, with few layers and small width."""
FIRST_WORD, LAST_WORD = 300, 100_000
"""The tokenizer of `tiny` has fewer ids."""


def make_random_base(folder: Path, *, last_word: int, **sizes: Any) -> Path:
    """Writes a folder with the tokenizer of `tiny` and weights in bfloat16. `sizes`: fields of its configuration.

    Ids from FIRST_WORD to `last_word`, which is left out, are words, `w300`; those from `last_word` on have none, and decode to nothing.
    """
    import torch  # here: they take seconds
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    torch.manual_seed(0)
    known: dict[str, Any] = Qwen3Config.from_pretrained(TINY).to_dict()
    layers = {"layer_types": ["full_attention"] * sizes.get("num_hidden_layers", known["num_hidden_layers"])}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**known | layers | sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"w{number}": number for number in range(FIRST_WORD, last_word)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a base model of the shape of Qwen3-0.6B, with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="of its family, with two layers of width 64")
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} is there already")
    sizes, last_word = (SMALL, FIRST_WORD) if given.small else (QWEN3_06B, LAST_WORD)
    make_random_base(given.folder, last_word=last_word, **sizes)


if __name__ == "__main__":
    main()
