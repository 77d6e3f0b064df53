"""Operations of runs beside a naive loop of torch and PEFT: a datum at a time, each loss as its formula says.

Axes: N positions of a datum, P all values of the adapter.
"""

import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from base_model.adapter import PEFT_PREFIX, save_adapter
from base_model.decoder import Decoder
from common.wire.messages import Array, LoraSpec, OptimSpec, f32
from common.wire.operations import STAND_IN, Datum, Forward, LossFn, RunOperation
from tests.support.run_cases import (
    RUN_LORA,
    carry_out,
    forward,
    forward_backward,
    make_datum,
    noisy,
    optim_step,
    outputs,
)
from tests.support.trainer_cases import TINY, load_tiny
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.open_step import TrainState
from trainer_service.optimiser import Moments, update
from trainer_service.packing import Budget
from trainer_service.run_step import Computed
from trainer_service.training import Trainer

LOSSES: tuple[LossFn, ...] = get_args(LossFn)
FAR: dict[str, Any] = {"low": f32([0.97] * 13), "high": f32([1.01] * 13)}
CONFIGS: list[tuple[LossFn, dict[str, float]]] = [
    *((loss, {}) for loss in LOSSES),
    ("ppo", {"clip_low": 0.5, "clip_high": 2.0}),
    ("cispo", {"clip_low": 0.5, "clip_high": 0.9}),
    ("gspo", {"clip_low": 0.6, "clip_high": 1.6}),
    ("dro", {"beta": 0.3}),
    ("stable_reinforce", {"beta": 0.3}),
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_tiny()


class Loop:
    """The training loop as one would write it."""

    def __init__(self, state: TrainState, folder: Path) -> None:
        from peft import PeftModel  # here: it takes a second

        folder.mkdir()
        for name, data in save_adapter(state.adapter, "tiny").items():
            (folder / name).write_bytes(data)
        base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self.model: Any = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        parameters = dict(self.model.named_parameters())
        names = [f"{PEFT_PREFIX}{name}.lora_{kind}.default.weight" for name in state.adapter.names() for kind in "AB"]
        self.parameters = [parameters[name] for name in names]  # in the order of our values
        self.adamw = torch.optim.AdamW(self.parameters, lr=1.0, weight_decay=0.0)

    def logprobs(self, datum: Datum) -> Tensor:
        logits_NV = self.model(input_ids=tensor(datum.tokens).long()[None]).logits[0].float()
        return logits_NV.log_softmax(-1).gather(1, tensor(datum.targets).long()[:, None]).squeeze(1)

    def forward_backward(self, operation: RunOperation) -> tuple[float, list[Tensor]]:
        asked = msgspec.msgpack.decode(operation.payload, type=Forward)
        logprobs = [self.logprobs(datum) for datum in asked.data]
        loss = torch.stack([naive(asked, datum, own) for datum, own in zip(asked.data, logprobs, strict=True)]).sum()
        loss.backward()
        return loss.item(), [own.detach() for own in logprobs]

    @property
    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])

    def optim_step(self, spec: OptimSpec) -> float:
        for group in self.adamw.param_groups:
            group |= {"lr": spec.learning_rate, "betas": (spec.beta1, spec.beta2), "eps": spec.eps}
            group["weight_decay"] = spec.weight_decay
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, spec.grad_clip or math.inf)
        self.adamw.step()
        self.adamw.zero_grad()
        return float(norm)

    @property
    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters])


def tensor(array: Array | None) -> Tensor:
    assert array is not None
    return torch.from_numpy(array.numpy().copy())


def naive(asked: Forward, datum: Datum, logp: Tensor) -> Tensor:
    """The loss of one datum."""
    if asked.loss == "cross_entropy":
        return -(tensor(datum.weights) * logp).sum() if datum.weights else -logp.sum()
    q, advantage = tensor(datum.logprobs), tensor(datum.advantages)
    ratio = (logp - q).exp()
    if asked.loss == "importance_sampling":
        return -(ratio * advantage).sum()
    if asked.loss == "dro":
        beta = 0.05 if asked.beta is None else asked.beta
        return -(logp * advantage - 0.5 * beta * (logp - q) ** 2).sum()
    if asked.loss == "stable_reinforce":
        losses = -ratio.clamp(max=2.0).detach() * logp * advantage + (asked.beta or 0.0) * 0.5 * (logp - q) ** 2
        return losses[advantage != 0].sum()
    if asked.loss == "cispo":
        return -(clip(ratio, asked, 0.0, 4.0).detach() * logp * advantage).sum()
    if asked.loss == "ppo":
        return -torch.minimum(ratio * advantage, clip(ratio, asked, 0.8, 1.2) * advantage).sum()
    mask = tensor(datum.mask)
    sequence = ((logp - q).detach() * mask).sum() / mask.sum()
    ratio = sequence.exp() * (logp - logp.detach()).exp()
    low, high = (bound if bound is None else tensor(bound) for bound in (datum.low, datum.high))
    bounded = clip(ratio, asked, 1 - 3e-4, 1 + 4e-4) if low is None or high is None else ratio.clamp(low, high)
    return -torch.minimum(ratio * advantage, bounded * advantage).sum()


def clip(ratio: Tensor, asked: Forward, low: float, high: float) -> Tensor:
    low = low if asked.clip_low is None else asked.clip_low
    return ratio.clamp(low, high if asked.clip_high is None else asked.clip_high)


def near_policy(loop: Loop, datum: Datum, seed: int) -> Datum:
    """The datum with log-probs at sampling from which the policy has moved a little: some ratios are clipped, some not."""
    with torch.no_grad():
        logprobs = loop.logprobs(datum).numpy()
    moved = np.random.default_rng(seed).normal(0, 0.15, len(logprobs))
    return msgspec.structs.replace(datum, logprobs=f32(logprobs + moved))


def begun(decoder: Decoder, folder: Path) -> tuple[Trainer, TrainState, Loop]:
    """A trainer, a run, and a plain loop at the same place."""
    trainer = Trainer(DecoderBackbone(decoder))
    state = noisy(trainer)
    return trainer, state, Loop(state, folder / "adapter")


def grad_of(computed: Computed) -> Tensor:
    assert computed.gradient is not None and computed.gradient.grad_P is not None
    return computed.gradient.grad_P


def assert_near(ours_P: Tensor, theirs_P: Tensor) -> None:
    assert float((ours_P - theirs_P).norm() / theirs_P.norm()) < 1e-5


def assert_outputs(computed: Any, index: int, expected: tuple[float, list[Tensor]]) -> None:
    found, (loss, logprobs) = outputs(computed.results[index]), expected
    assert found.metrics.pop("loss:sum") == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert found.metrics in ({}, {f"{STAND_IN}:max": 1.0})
    for ours, theirs in zip(found.logprobs, logprobs, strict=True):
        assert np.abs(ours.numpy() - theirs.numpy()).max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("loss,config", CONFIGS, ids=str)
def test_each_loss_has_the_outputs_and_the_gradient_of_its_formula(
    decoder: Decoder, tmp_path: Path, loss: LossFn, config: dict[str, float]
) -> None:
    trainer, state, loop = begun(decoder, tmp_path)
    data = [make_datum(loss, i, num_prompt=4 + i, num_answer=9 - i) for i in range(3)]
    if loss != "cross_entropy":
        data = [near_policy(loop, datum, i) for i, datum in enumerate(data)]
    operation = forward_backward(1, loss, *data, **config)

    computed = carry_out(trainer, [operation], state)

    assert_outputs(computed, 0, loop.forward_backward(operation))
    assert_near(grad_of(computed), loop.gradient)


def test_passes_and_steps_say_that_their_loss_stands_in_for_another(decoder: Decoder) -> None:
    trainer = Trainer(DecoderBackbone(decoder))
    state = noisy(trainer)
    begun = carry_out(trainer, [forward_backward(1, "stable_reinforce"), forward_backward(2, "cispo")], state)
    assert [outputs(result).metrics.get(f"{STAND_IN}:max") for result in begun.results] == [1.0, None]
    assert carry_out(trainer, [optim_step(3)], state, begun.gradient).metrics[STAND_IN] == 1.0
    only_looks = carry_out(trainer, [forward(1, "stable_reinforce"), forward_backward(2), optim_step(3)], state)
    assert STAND_IN not in only_looks.metrics


def test_gspo_takes_bounds_by_token_and_a_mask_of_its_own(decoder: Decoder, tmp_path: Path) -> None:
    trainer, state, loop = begun(decoder, tmp_path)
    mask = f32([1.0, 0.0] * 6 + [1.0])
    datum = near_policy(loop, make_datum("gspo", 3, mask=mask, advantages=f32(np.linspace(-1, 1, 13)), **FAR), 3)
    operation = forward_backward(1, "gspo", datum)

    computed = carry_out(trainer, [operation], state)

    assert_outputs(computed, 0, loop.forward_backward(operation))
    assert_near(grad_of(computed), loop.gradient)


@pytest.mark.parametrize(
    ("grad_clip", "lora"),
    [(0.0, RUN_LORA), (0.5, LoraSpec(rank=8, alpha=32.0, targets=("gate_proj", "up_proj", "down_proj")))],
)
def test_gradients_add_up_and_adamw_takes_each_calls_own_parameters(
    decoder: Decoder, tmp_path: Path, grad_clip: float, lora: LoraSpec
) -> None:
    # Given a run at alpha 32 and a plain loop at the same place
    trainer = Trainer(DecoderBackbone(decoder), Budget(64))
    state = noisy(trainer, lora=lora)
    start_P, loop = state.values_P, Loop(state, tmp_path / "adapter")

    # When both take two steps of several forward_backwards, with parameters of their own
    for step, rate in enumerate((3e-4, 1e-3)):
        optim = OptimSpec(rate, weight_decay=0.1 * step, grad_clip=grad_clip, beta1=0.9 - 0.1 * step, eps=1e-12)
        fbs = [forward_backward(3 * step + i + 1, loss) for i, loss in enumerate(("cross_entropy", "cispo"))]
        computed = carry_out(trainer, [*fbs, optim_step(3 * step + 3, optim)], state)
        for index, operation in enumerate(fbs):
            found, (loss, _) = outputs(computed.results[index]), loop.forward_backward(operation)
            assert found.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        norm = loop.optim_step(optim)
        assert computed.state is not None
        assert computed.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        state = computed.state

    # Then they stand at the same place: as vectors, because AdamW turns rounding noise into a step of any sign
    assert state.moments.num_steps == 2
    assert float((state.values_P - loop.values).norm() / (state.values_P - start_P).norm()) < 2e-3


@pytest.mark.parametrize("eps", [1e-12, 1e-8])
def test_one_gradient_gives_the_step_that_torchs_adamw_gives(eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values, grads = torch.randn(500, generator=generator), torch.randn(4, 500, generator=generator) * 1e-7
    theirs = values.clone().requires_grad_()
    adamw = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=eps, weight_decay=0.01)
    moments = Moments.zeros(500, torch.device("cpu"))

    for grad in grads:
        moments = update(values, grad.clone(), moments, OptimSpec(1e-3, weight_decay=0.01, grad_clip=0.0, eps=eps))
        theirs.grad = grad.clone()
        adamw.step()

    assert float((values - theirs.detach()).abs().max()) < 1e-6


def test_a_forward_gives_outputs_and_no_gradient(decoder: Decoder, tmp_path: Path) -> None:
    trainer, state, loop = begun(decoder, tmp_path)
    operation = forward(1, "importance_sampling")

    computed = carry_out(trainer, [operation], state)

    assert_outputs(computed, 0, loop.forward_backward(operation))
    assert computed.gradient is not None and computed.gradient.grad_P is None


def test_targets_without_weight_have_log_probs_and_no_gradient(decoder: Decoder, tmp_path: Path) -> None:
    # Given data whose targets are no next tokens, one of them without any weight, as a client's own loss asks for
    trainer, state, loop = begun(decoder, tmp_path)
    none = make_datum("cross_entropy", 1, weights=f32([0.0] * 13))
    some = make_datum("cross_entropy", 2, targets=make_datum("cross_entropy", 3).tokens)

    computed = carry_out(trainer, [forward_backward(1, "cross_entropy", none, some)], state)

    assert_outputs(computed, 0, loop.forward_backward(forward_backward(1, "cross_entropy", none, some)))
    alone = carry_out(trainer, [forward_backward(1, "cross_entropy", some)], state)
    assert torch.allclose(grad_of(computed), grad_of(alone), rtol=1e-5, atol=1e-7)
    nothing_learned = carry_out(trainer, [forward_backward(1, "cross_entropy", none)], state)
    assert nothing_learned.gradient is not None and nothing_learned.gradient.grad_P is None
    weightless = make_datum("cross_entropy", 2, weights=None)
    assert_outputs(
        carry_out(trainer, [forward(1, "cross_entropy", weightless)], state),
        0,
        loop.forward_backward(forward(1, "cross_entropy", weightless)),
    )


def test_data_that_begin_alike_share_their_beginning(decoder: Decoder) -> None:
    prompt = make_datum("cross_entropy", 5, num_prompt=60, num_answer=4)
    alike = [
        msgspec.structs.replace(prompt, tokens=changed(prompt.tokens, i), targets=changed(prompt.targets, i + 1))
        for i in range(4)
    ]
    sharing, plain = Trainer(DecoderBackbone(decoder)), Trainer(DecoderBackbone(decoder), share_prefixes=False)
    state = noisy(sharing)
    operation = forward_backward(1, "cross_entropy", *alike)

    one, other = (carry_out(trainer, [operation], state) for trainer in (sharing, plain))

    assert one.forward_tokens < other.forward_tokens / 2
    assert_near(grad_of(one), grad_of(other))


def changed(array: Array, last: int) -> Array:
    """The array with another token at its end."""
    values = array.numpy().copy()
    values[-1] = last
    return Array("i4", array.shape, values.tobytes())


@pytest.mark.parametrize(
    "loss,config", [("stable_reinforce", {"clip_low": 0.5}), ("ppo", {"beta": 0.1}), ("ppo", {"clip_high": math.inf})]
)
def test_bounds_that_a_loss_does_not_know_fail_the_operation(
    decoder: Decoder, loss: LossFn, config: dict[str, float]
) -> None:
    trainer = Trainer(DecoderBackbone(decoder))

    computed = carry_out(trainer, [forward_backward(1, loss, **config)], noisy(trainer))

    assert computed.results[0].failure is not None and computed.results[0].failure.kind == "invalid"
