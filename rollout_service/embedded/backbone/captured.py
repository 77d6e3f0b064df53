"""Steps of decoding as CUDA graphs: on a GPU the host takes longer to start a step's kernels than the device to run them.

    layout, tokens, positions, numbers ─ copied into a step's own tensors ─► replay ─► tokens and log-probs

A step reads only tensors that keep their address: its own, the weights, and lanes of factors. It finds the rows' keys and values
by addresses in one of them. So rows that join, leave or grow change what the tensors hold, and a step is captured once
for each number of rows, shape of lanes and kind of sampling. It computes the same when it runs again.

Axes: n rows under way, N sampled ones, n rounded up, P places in lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from base_model.stacked import LanePlanner, Product
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone, ForwardPart
from rollout_service.embedded.backbone.layout import ForwardLayout
from rollout_service.embedded.sampler import Sampled, SamplingPlan, sample

ON_CUDA = False
"""Whether `auto` chooses our decoder on CUDA for its families, and its steps are captured there."""
MAX_STEPS = 64
"""Captured steps at once; of more, the one unused for longest leaves."""

T = TypeVar("T")
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""See `decode_kernel.attend`."""
Record = Callable[[Callable[[], T]], tuple[T, Callable[[], object]]]
"""Runs a function; returns its result, and what computes it again into the same tensors."""


def captured_for(model: EngineBackbone, lanes_bytes: int) -> "CapturedSteps | None":
    """Returns None where steps run as they are: elsewhere than on CUDA, and with other backbones than our decoder."""
    if not (ON_CUDA and model.embedding.device.type == "cuda" and isinstance(model, FusedDecoder)):
        return None
    from rollout_service.embedded.backbone.decode_kernel import attend  # here: only torch for CUDA brings Triton

    return CapturedSteps(model, attend, partial(graph, pool=torch.cuda.graph_pool_handle()), lanes_bytes)


def graph(run: Callable[[], T], pool: Any) -> tuple[T, Callable[[], object]]:
    """Captures a function in a CUDA graph. `pool`: of the memory that graphs share, for only one runs at a time."""
    run()  # compiles kernels and makes workspaces, which a capture must not
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, pool=pool, capture_error_mode="thread_local"):  # other threads load adapters
        result = run()
    captured.replay()
    return result, captured.replay


@dataclass(slots=True, eq=False)
class StepRows:
    """What a step reads of its rows, beside their tokens."""

    layout: ForwardLayout
    products: list[Product]
    places: np.ndarray  # [n] of the layout's rows in the forward
    addresses: Tensor  # int64 [layers, P]: where the keys and values at a place begin; 0: no row is there
    sampled: Tensor  # int64 [N]: places of the rows that are sampled
    plan: SamplingPlan

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for rows that one captured step serves."""
        factors = [(each.factors.values.data_ptr(), each.factors.values.shape) for each in self.products]
        return self.addresses.shape, self.sampled.shape, *self.plan.kind(), *factors

    def take(self, other: "StepRows") -> None:
        """Makes its tensors hold what those of rows of the same shape hold."""
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(new)
        self.layout, self.places = other.layout, other.places

    def _tensors(self) -> list[Tensor]:
        return [self.addresses, self.sampled, *(each for each in self.plan.columns().values() if each is not None)]


def _addresses(layout: ForwardLayout, places: np.ndarray, num_places: int) -> np.ndarray:
    found = np.zeros((len(layout.pools[0].layers), num_places), np.int64)
    first = 0
    for pool in layout.pools:
        starts, num = np.array([layer.data_ptr() for layer in pool.layers]), len(pool.slots)
        found[:, places[first : first + num]] = starts[:, None] + np.arange(num) * pool.layers[0][0].nbytes
        first += num
    return found


def _filled(column: Tensor | None, size: int) -> Tensor | None:
    """[n, ...] -> [size, ...]: rows that only fill up sample like the first."""
    return None if column is None else torch.cat([column, column[:1].expand(size - len(column), *column.shape[1:])])


@dataclass(slots=True)
class CapturedStep:
    """One step, for rows of one shape."""

    rows: StepRows
    inputs: Tensor  # int64 [P + P + N]: tokens, positions, and the bits of numbers that decide the next tokens
    sampled: Sampled  # overwritten by each replay
    replay: Callable[[], object]


class CapturedSteps:
    """The captured steps of one engine. For one thread."""

    def __init__(self, model: EngineBackbone, attend: Attend, record: Record[Sampled], lanes_bytes: int) -> None:
        """`lanes_bytes`: of all lanes of factors."""
        self._model, self._attend, self._record = model, attend, record
        self._device = model.embedding.device
        self._planner = LanePlanner(self._device, 1, budget_bytes=lanes_bytes)
        self._steps: dict[tuple[object, ...], CapturedStep] = {}
        self._placed: tuple[ForwardLayout, StepRows | None] | None = None  # the newest layout

    def clear(self) -> None:
        """Gives back their memory."""
        self._steps.clear()
        self._placed = None

    def step(
        self, layout: ForwardLayout, tokens: np.ndarray, positions: np.ndarray, uniforms: np.ndarray
    ) -> Sampled | None:
        """Computes a step of a layout's rows: int64 and float64 [n]. None for one that is not captured: with a grammar, or more factors
        than the lanes have memory for."""
        if self._placed is None or self._placed[0] is not layout:
            self._placed = layout, None if layout.masked else self._place(layout)
        if (rows := self._placed[1]) is None:
            return None
        num_places, size = rows.addresses.shape[1], layout.size
        inputs = np.zeros(2 * num_places + size, np.int64)
        inputs[rows.places], inputs[num_places + rows.places] = tokens, positions
        inputs[2 * num_places :][: len(uniforms)] = uniforms.view(np.int64)
        step = self._steps.pop(shape := rows.shape, None)
        if step is None:
            step = self._capture(rows, torch.from_numpy(inputs))
        else:
            if step.rows.layout is not layout:
                step.rows.take(rows)
            step.inputs.copy_(torch.from_numpy(inputs))
            step.replay()
        self._steps[shape] = step
        if len(self._steps) > MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return step.sampled

    def _place(self, layout: ForwardLayout) -> StepRows | None:
        if (planned := self._planner.plan_lanes(layout.adapters)) is None:
            return None
        products, of_rows, num_places = planned
        places, plan = np.array(of_rows), layout.sampling
        addresses = torch.from_numpy(_addresses(layout, places, num_places)).to(self._device)
        sampled = torch.from_numpy(np.pad(places, (0, layout.size - len(places)))).to(self._device)
        filled = {name: _filled(column, layout.size) for name, column in plan.columns().items()}
        return StepRows(layout, products, places, addresses, sampled, replace(plan, **filled))

    def _capture(self, rows: StepRows, host: Tensor) -> CapturedStep:
        own = replace(rows, addresses=rows.addresses.clone(), sampled=rows.sampled.clone())
        own.plan = replace(
            rows.plan, **{name: _filled(c, len(rows.sampled)) for name, c in rows.plan.columns().items()}
        )
        inputs = host.to(self._device)
        sampled, replay = self._record(lambda: self._computed(own, inputs))
        return CapturedStep(own, inputs, sampled, replay)

    def _computed(self, rows: StepRows, inputs: Tensor) -> Sampled:
        """What is captured: a function of these tensors' values that waits for nothing and copies nothing from the host."""
        num, size = rows.addresses.shape[1], len(rows.sampled)
        tokens, positions, bits = inputs.split_with_sizes([num, num, size])

        def attend(layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
            assert scale is None and window is None, "our decoder's families have plain attention"
            return self._attend(qkv, rows.addresses[layer], positions, self._model.config.num_heads)

        hidden = self._model.forward(tokens, positions, [ForwardPart(num, attend, rows.products)])
        logits = self._model.logits(hidden.index_select(0, rows.sampled))
        return sample(logits, bits.view(torch.float64), rows.plan)
