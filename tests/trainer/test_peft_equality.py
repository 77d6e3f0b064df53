"""The trainer beside PEFT: saved adapters mean the same there, and a step there gives the same weights.

Axes: R rows, T tokens of a row, M trained tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from base_model.adapter import PEFT_PREFIX, Adapter, save_adapter
from base_model.decoder import Decoder
from common.wire.messages import LoraSpec, LossSpec, OptimSpec, TrainStep
from tests.support.trainer_cases import LORA, TINY, load_tiny, make_init, make_rows, make_step, nothing, steps
from trainer_service import lora
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.batch import SampledRows, parse_rows
from trainer_service.losses import batch_of, row_terms
from trainer_service.open_step import TrainState
from trainer_service.packing import trees
from trainer_service.training import Trainer


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_tiny()


def peft_model(adapter: Adapter, folder: Path) -> Any:
    """The adapter as a user would load it."""
    from peft import PeftModel  # here: it takes a second

    folder.mkdir()
    for name, data in save_adapter(adapter, "tiny").items():
        (folder / name).write_bytes(data)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


def peft_logprobs(model: Any, batch: SampledRows, row: int, temperature: float = 1.0) -> Tensor:
    """[M] of one row, alone in its forward."""
    tokens_T = torch.from_numpy(batch.tokens[row])
    logits_TV = model(input_ids=tokens_T[None]).logits[0].float() / temperature
    all_T = logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None]).squeeze(1)
    return all_T[torch.from_numpy(batch.written[row][1:])]


def our_logprobs(
    decoder: Decoder, adapter: Adapter, batch: SampledRows, *, share: bool, temperature: float
) -> list[Tensor]:
    """[M] of each row, all rows in one forward."""
    everything, loss = np.ones(len(batch), bool), LossSpec()
    whole = batch_of(batch, row_terms(batch, loss), loss, 0)
    backbone = DecoderBackbone(decoder)
    packed = trees(whole, everything, backbone.cost() if share else None)
    rows = [row for tree in packed for row in tree.rows]
    sequences = Sequences(packed, [whole.targets[row] for row in rows], [temperature] * len(rows))
    stack = lora.AdapterStack(lora.AdapterLayout.of(adapter), decoder.device)
    place = stack.put(lora.flatten(adapter), adapter.scale)
    values_M = backbone.logprobs(sequences, [(stack, place)] * len(packed))
    return list(values_M.detach().split([int(batch.written[r].sum()) for r in rows]))


def after(decoder: Decoder, todo: list[TrainStep], spec: LoraSpec = LORA) -> TrainState:
    trainer = Trainer(DecoderBackbone(decoder))
    state = trainer.init(make_init(lora=spec))
    for step in todo:
        state = trainer.step(step, state, nothing).state
    return state


def parsed(decoder: Decoder, step: TrainStep) -> SampledRows:
    return parse_rows(
        step.rows, version=step.adapter.version, vocab=decoder.config.vocab, context=decoder.config.context
    )


@pytest.mark.parametrize(
    ("share", "temperature", "targets"), [(False, 1.0, ()), (True, 0.7, ()), (True, 1.0, ("q_proj", "down_proj"))]
)
def test_a_trained_adapter_has_the_same_logprobs_in_peft(
    decoder: Decoder, tmp_path: Path, share: bool, temperature: float, targets: tuple[str, ...]
) -> None:
    # Given an adapter after two real steps at a rate that moves it
    spec = LoraSpec(rank=4, alpha=8.0, targets=targets)
    state = after(decoder, steps(2, optim=OptimSpec(0.02)), spec)
    batch = parsed(decoder, make_step(0, make_rows(9)))

    # When PEFT loads its files
    model = peft_model(state.adapter, tmp_path / "adapter")

    # Then each trained token has the same log-prob, and it is not the base model's
    ours = our_logprobs(decoder, state.adapter, batch, share=share, temperature=temperature)
    with torch.no_grad():
        theirs = [peft_logprobs(model, batch, row, temperature) for row in range(len(batch))]
        with model.disable_adapter():
            base = peft_logprobs(model, batch, 0, temperature)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert float((ours[0] - base).abs().max()) > 1e-2


def peft_step(
    model: Any, optimiser: torch.optim.Optimizer, batch: SampledRows, loss: LossSpec, grad_clip: float
) -> None:
    """One plain GRPO step, a row at a time."""
    terms = row_terms(batch, loss)
    total = torch.zeros(())
    for row in range(len(batch)):
        ratio_M = (peft_logprobs(model, batch, row) - torch.from_numpy(batch.logprobs[row][batch.written[row]])).exp()
        advantage = float(terms.advantages_R[row])
        surrogate_M = torch.minimum(ratio_M * advantage, ratio_M.clamp(0.8, 1.2) * advantage)
        total = total - surrogate_M.mean() / len(batch)
    total.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], grad_clip)
    optimiser.step()
    optimiser.zero_grad()


def test_steps_give_the_same_weights_as_peft_with_torchs_adamw(decoder: Decoder, tmp_path: Path) -> None:
    # Given the same start on both sides
    optim = OptimSpec(1e-3, weight_decay=0.1, grad_clip=0.05)
    todo = steps(2, optim=optim)
    start = after(decoder, [])
    model = peft_model(start.adapter, tmp_path / "adapter")
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    # When both take two steps
    ours = after(decoder, todo)
    for step in todo:
        peft_step(model, adamw, parsed(decoder, step), step.loss, 0.05)

    # Then the updates agree: as vectors, because AdamW turns a gradient of rounding noise into a step of any sign
    theirs = dict(model.named_parameters())
    names = [f"{PEFT_PREFIX}{name}.lora_{kind}.default.weight" for name in ours.adapter.names() for kind in "AB"]
    theirs_P = torch.cat([theirs[name].detach().flatten() for name in names])
    ours_P, start_P = lora.flatten(ours.adapter), lora.flatten(start.adapter)
    assert float((ours_P - start_P).abs().max()) > 1e-3
    assert float((ours_P - theirs_P).norm() / (ours_P - start_P).norm()) < 1e-3


def test_init_starts_where_peft_starts(decoder: Decoder) -> None:
    from peft import LoraConfig, get_peft_model

    # PEFT's B is zero and its A uniform within 1 / sqrt(in); so is ours
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=LORA.rank, lora_alpha=8, target_modules="all-linear"))  # pyright: ignore
    theirs = {name: p for name, p in model.named_parameters() if "lora_" in name}
    ours = after(decoder, []).adapter

    assert len(theirs) == 2 * len(ours.names())
    for name in ours.names():
        a = theirs[f"{PEFT_PREFIX}{name}.lora_A.default.weight"]
        assert a.shape == ours.a[name].shape and not ours.b[name].any()
        assert float(ours.a[name].std()) == pytest.approx(float(a.detach().std()), rel=0.2)
