"""Steps of decoding as CUDA graphs: on a GPU the host takes longer to start a step's kernels than the device to run them.

    layout, tokens, positions, numbers ─ copied into a step's own tensors ─► replay ─► tokens and log-probs

A step reads only tensors that keep their address: its own, the weights, and lanes of factors. It finds the rows' keys and values
by addresses in one of them. So rows that join, leave or grow change what the tensors hold, and a step is captured once
for each number of rows, shape of lanes and kind of sampling. It computes the same when it runs again.

Axis: n rows under way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from base_model.stacked import LanePlanner, Product
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone, ForwardPart
from rollout_service.embedded.backbone.layout import ForwardLayout
from rollout_service.embedded.sampler import Sampled, sample

MAX_STEPS = 64
"""Captured steps at once; of more, the one unused for longest leaves."""

RowAttend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""The signature of `decode_kernel.attend`."""
Capture = Callable[[Callable[[], Sampled]], tuple[Sampled, Callable[[], object]]]
"""A function that calls another, and returns its result and what computes it again, in the same tensors."""


def captured_for(model: EngineBackbone, lanes_bytes: int) -> "CapturedSteps | None":
    """Returns None where steps run as they are: elsewhere than on CUDA, and with other backbones than our decoder."""
    if not (model.embedding.device.type == "cuda" and isinstance(model, FusedDecoder)):
        return None
    from rollout_service.embedded.backbone.decode_kernel import attend  # here: only torch for CUDA brings Triton

    return CapturedSteps(model, attend, partial(capture_on_cuda, model.embedding.device), lanes_bytes)


def capture_on_cuda(device: torch.device) -> Capture:
    """Captures functions in CUDA graphs that share memory, for only one runs at a time. The memory ends with the last of them."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Sampled]) -> tuple[Sampled, Callable[[], object]]:
        with torch.cuda.device(device):  # where Triton launches, and whose stream is captured
            run()  # compiles kernels and makes workspaces, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads load adapters
                sampled = run()
        graph.replay()
        return sampled, graph.replay

    return capture


def _inputs(
    layout: ForwardLayout,
    places: np.ndarray,
    num_places: int,
    tokens: np.ndarray,
    positions: np.ndarray,
    bits: np.ndarray,
) -> Tensor:
    """int64: at each place the addresses of the row's keys and values by layer, 0 without a row, its token and its position; then for
    each sampled row its place and the bits of its number."""
    at = [
        np.array([layer.data_ptr() for layer in pool.layers])[:, None]
        + np.arange(len(pool.slots)) * pool.layers[0][0].nbytes
        for pool in layout.pools
    ]
    by_place = np.zeros((len(at[0]) + 2, num_places), np.int64)
    by_place[:, places] = np.concatenate([np.concatenate(at, axis=1), [tokens, positions]])
    by_row = np.zeros((2, layout.size), np.int64)
    by_row[:, : len(places)] = places, bits
    return torch.from_numpy(np.concatenate([by_place.ravel(), by_row.ravel()]))


class CapturedStep(NamedTuple):
    """One step, for rows of one shape."""

    inputs: Tensor
    columns: list[Tensor]  # of the sampling plan
    sampled: Sampled  # overwritten by each replay
    replay: Callable[[], object]


class CapturedSteps:
    """The captured steps of one engine. For one thread."""

    def __init__(
        self, model: EngineBackbone, attend: RowAttend, captures: Callable[[], Capture], lanes_bytes: int
    ) -> None:
        """`lanes_bytes`: of all lanes of factors."""
        self._model, self._attend, self._captures = model, attend, captures
        self._planner = LanePlanner(model.embedding.device, 1, budget_bytes=lanes_bytes)
        self._planned: tuple[ForwardLayout, tuple[list[Product], np.ndarray, int] | None] | None = None
        self._steps: dict[tuple[object, ...], CapturedStep] = {}
        self._capture_step = captures()

    def clear(self) -> None:
        """Gives back their memory."""
        self._steps.clear()
        self._planned = None  # it holds the pools of its layout
        self._capture_step = self._captures()

    def step(
        self, layout: ForwardLayout, tokens: np.ndarray, positions: np.ndarray, uniforms: np.ndarray
    ) -> Sampled | None:
        """Computes a step of a layout's rows: int64 and float64 [n]. Returns None for one that is not captured: with a
        grammar, or more factors than the lanes have memory for."""
        if self._planned is None or self._planned[0] is not layout:
            self._planned = layout, self._planner.plan_lanes(layout.adapters)
        if layout.masked or (lanes := self._planned[1]) is None:
            return None
        products, places, num_places = lanes
        inputs = _inputs(layout, places, num_places, tokens, positions, uniforms.view(np.int64))
        factors = ((each.factors.values.data_ptr(), each.factors.values.shape) for each in products)
        shape = (num_places, layout.size, *layout.sampling.kind(), *factors)
        if (step := self._steps.pop(shape, None)) is None:
            step = self._capture(layout, products, num_places, inputs)
        else:
            step.inputs.copy_(inputs)
            for own, new in zip(step.columns, layout.sampling.columns().values(), strict=True):
                own[: len(new)].copy_(new)
            step.replay()
        self._steps[shape] = step
        if len(self._steps) > MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return step.sampled

    def _capture(self, layout: ForwardLayout, products: list[Product], num_places: int, host: Tensor) -> CapturedStep:
        inputs, model = host.to(self._model.embedding.device), self._model
        filled = {name: _filled(column, layout.size) for name, column in layout.sampling.columns().items()}
        plan = replace(layout.sampling, **filled)
        by_place, by_row = inputs.split_with_sizes([len(inputs) - 2 * layout.size, 2 * layout.size])
        *addresses, tokens, positions = by_place.view(-1, num_places)
        sampled, bits = by_row.view(2, -1)

        def attend(layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
            assert scale is None and window is None, "our decoder's families have plain attention"
            return self._attend(qkv, addresses[layer], positions, model.config.num_heads)

        def compute() -> Sampled:  # a function of the values in these tensors; it waits for nothing
            hidden = model.forward(tokens, positions, [ForwardPart(num_places, attend, products)])
            return sample(model.logits(hidden.index_select(0, sampled)), bits.view(torch.float64), plan)

        return CapturedStep(inputs, [*filled.values()], *self._capture_step(compute))


def _filled(column: Tensor, size: int) -> Tensor:
    """[n, ...] -> [size, ...]: rows that only fill up sample like the first."""
    return torch.cat([column, column[:1].expand(size - len(column), *column.shape[1:])])
