"""The embedded engine on transformers' modules: turns of each family have the log-probs that the trainers' backbone gives them."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, NemotronConfig

from base_model.adapter import Adapter, init_adapter, save_adapter
from common.errors import InvalidInput
from common.wire.messages import BASE, AdapterRef, LoraSpec
from rollout_service.__main__ import load_engine
from rollout_service.embedded.backbone.choice import load_backbone
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.backbone.modules import ModulesDecoder, load_modules
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Generated
from rollout_service.settings import RolloutSettings
from tests.support.families import FAMILIES, SHAPE, VOCAB, save_family
from tests.support.rollout_cases import TINY, NoEnd, one, ref, request
from trainer_service import lora
from trainer_service.backbone.interface import AdapterPlace, Backbone, Sequences
from trainer_service.backbone.loading import load_modules as load_trained
from trainer_service.packing import Tree

CLOSE = 1e-5
SPECS: dict[AdapterRef, LoraSpec] = {
    ref("a"): LoraSpec(1, 2.0),
    ref("b"): LoraSpec(8, 16.0),
    ref("c"): LoraSpec(8, 4.0),
    ref("d"): LoraSpec(64, 64.0),
    ref("e"): LoraSpec(3, 6.0, ("q_proj", "o_proj")),
}
MANY_HEADS = "gemma3 of four key heads"
"""Few and many are computed in two ways on a CPU."""
STOPS = tuple(range(0, VOCAB, 3))
"""Tokens that end a turn, so that most are kept for the next one."""
Talk = list[tuple[list[int], Generated]]
"""The tokens before each turn, and what it generated."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    found = {family: save_family(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return found | {MANY_HEADS: save_family("gemma3", tmp_path_factory.mktemp("heads"), num_key_value_heads=4)}


def adapters_of(shapes: Mapping[str, tuple[int, int]]) -> dict[AdapterRef, Adapter]:
    found: dict[AdapterRef, Adapter] = {}
    for seed, (name, spec) in enumerate(SPECS.items()):
        initial, generator = init_adapter(spec, shapes, seed), torch.Generator().manual_seed(seed)
        b = {leaf: 0.1 * torch.randn(factor.shape, generator=generator) for leaf, factor in initial.b.items()}
        found[name] = Adapter(spec, initial.a, b)
    return found


async def talk(engine: TorchEngine, adapter: AdapterRef, number: int, temperature: float) -> Talk:
    """A trajectory of some turns; its prompt and the replies are of lengths of its own."""
    drawn, turns = np.random.default_rng(number), Talk()
    tokens: list[int] = drawn.integers(0, VOCAB, 7 + 5 * number).tolist()
    for turn in range(3):
        scored = -1 if turn == 0 and number % 2 else 0
        asked = request(
            adapter,
            tokens=tokens,
            group=number,
            turn=turn,
            temperature=temperature,
            max_tokens=9,
            prompt_logprobs=scored,
            stop_ids=STOPS,
        )
        turns.append((tokens, await one(engine, asked)))
        tokens = [*tokens, *turns[-1][1].tokens, *drawn.integers(0, VOCAB, 3 + number).tolist()]
    return turns


def trained_logprobs(
    backbone: Backbone, adapter: Adapter | None, tokens: Sequence[int], temperature: float
) -> np.ndarray:
    """Log-probs of all tokens but the first, as trainers compute them."""
    places: list[AdapterPlace] | None = None
    if adapter is not None:
        stack = backbone.stack(lora.AdapterLayout.of(adapter))
        places = [(stack, stack.put(lora.flatten(adapter), adapter.scale))]
    tokens_T = np.array(tokens)
    at_T = np.arange(len(tokens_T) - 1)
    tree = Tree(0, (0,), tokens_T[:-1], at_T, np.zeros(len(at_T), np.int64), (at_T,))
    return backbone.logprobs(Sequences([tree], [tokens_T[1:]], [temperature or 1.0]), places).detach().cpu().numpy()


@pytest.mark.asyncio
@pytest.mark.parametrize("family", [*FAMILIES, MANY_HEADS])
async def test_turns_of_mixed_adapters_have_the_log_probs_of_the_trainers_backbone(
    bases: dict[str, Path], device: str, family: str
) -> None:
    # Given trajectories of adapters of several ranks, and of the bare base model, that talk beside each other
    trained, sampled = load_trained(bases[family], device=device), load_modules(bases[family], device=device)
    adapters = adapters_of(sampled.linear_shapes())
    asked = [
        (name, number, (1.0, 0.7, 0.0)[number % 3]) for number, name in enumerate([*adapters, BASE, ref("a"), BASE])
    ]
    engine = TorchEngine(sampled, NoEnd())
    await engine.start()
    for name, adapter in adapters.items():
        await engine.load_files(name, save_adapter(adapter, "base"))
    talks = await asyncio.gather(*(talk(engine, *each) for each in asked))
    prefilled = engine.counters()["prefill_tokens"]
    await engine.stop()

    # Then each token has the log-prob that it will be trained with, in later turns too, whose beginnings were kept
    for (name, _, temperature), turns in zip(asked, talks, strict=True):
        whole = [*turns[-1][0], *turns[-1][1].tokens]
        expected = trained_logprobs(trained, adapters.get(name), whole, temperature)
        for before, found in turns:
            own = slice(len(before) - 1, len(before) - 1 + len(found.tokens))
            np.testing.assert_allclose(found.logprobs, expected[own], atol=CLOSE, rtol=CLOSE)
            if len(found.prompt_logprobs):
                scores = found.prompt_logprobs.numpy()[1:]
                np.testing.assert_allclose(scores, expected[: len(scores)], atol=CLOSE, rtol=CLOSE)
    assert prefilled < sum(len(before) - 1 for turns in talks for before, _ in turns)

    # And a greedy turn is transformers' own
    model: Any = AutoModelForCausalLM.from_pretrained(bases[family])
    prompt, greedy = talks[asked.index((BASE, 5, 0.0))][0]
    told = model.generate(torch.tensor([prompt]), max_new_tokens=len(greedy.tokens), do_sample=False, eos_token_id=-1)
    assert told[0, len(prompt) :].tolist() == greedy.tokens


def choose(folder: Path, **settings: Any) -> EngineBackbone:
    return load_backbone(RolloutSettings(**settings), folder)


def test_on_a_cpu_the_decoder_computes_the_families_that_it_knows_and_transformers_the_others(
    bases: dict[str, Path],
) -> None:
    assert isinstance(choose(TINY), FusedDecoder)
    assert isinstance(choose(TINY, rollout_backbone="transformers"), ModulesDecoder)
    found = choose(bases["llama3"], max_context=64, rollout_dtype="bfloat16")
    assert isinstance(found, ModulesDecoder)
    assert found.config.context == 64 and found.embedding.dtype == torch.bfloat16
    with pytest.raises(InvalidInput, match="MARLAAS_ROLLOUT_BACKBONE=transformers or MARLAAS_ENGINE=vllm"):
        choose(bases["llama3"], rollout_backbone="decoder")


def test_what_neither_computes_is_refused_by_name_with_vllm_as_the_way_out(tmp_path: Path) -> None:
    folder = save_family("gemma3", tmp_path, final_logit_softcapping=30.0)
    with pytest.raises(InvalidInput, match=r"final_logit_softcapping 30\.0 .*MARLAAS_ENGINE=vllm"):
        choose(folder)


def test_layers_that_the_engine_cannot_keep_are_refused_by_name(tmp_path: Path) -> None:
    """Values narrower than keys, as DeepSeek has them; layers that do not tell their attention what the model was called with."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    shape: dict[str, Any] = SHAPE | experts | latent | {"topk_group": 1, "num_key_value_heads": 4}
    for name, config in {"narrow": DeepseekV3Config(**shape), "silent": NemotronConfig(**SHAPE)}.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)  # pyright: ignore
    with pytest.raises(InvalidInput, match=r"keys and values, .* differ in shape .*MARLAAS_ENGINE=vllm"):
        choose(tmp_path / "narrow")
    with pytest.raises(InvalidInput, match=r"layers that keep arguments .*MARLAAS_ENGINE=vllm"):
        choose(tmp_path / "silent")


def test_deterministic_mode_refuses_transformers_by_name() -> None:
    with pytest.raises(InvalidInput, match="rollout_backbone"):
        load_engine(RolloutSettings(deterministic=True, rollout_backbone="transformers"))


def test_a_base_that_is_computed_otherwise_than_by_transformers_is_refused(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = ModulesDecoder.attend

    def without_windows(self: ModulesDecoder, layer: int, qkv: torch.Tensor, scale: float, window: int) -> torch.Tensor:
        return attend(self, layer, qkv, scale, None)

    monkeypatch.setattr(ModulesDecoder, "attend", without_windows)
    with pytest.raises(InvalidInput, match="'mistral': log-probs of rows beside each other are off by"):
        load_modules(bases["mistral"])
    wide = save_family("mistral", bases["mistral"].parent / "wide", sliding_window=100)
    with pytest.raises(InvalidInput, match="'mistral': its layers do not say their sliding window"):
        load_modules(wide)
