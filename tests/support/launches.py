"""Counts what torch's compiler would launch on a device for each graph, on a machine without one: it schedules fused Triton
kernels, which are not compiled; the graph is computed operator by operator."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.fx import GraphModule


@dataclass
class Launches:
    """The launches of a graph."""

    fused: list[int] = field(
        default_factory=list[int]
    )  # of each kernel that the compiler makes, the bytes that it moves
    operators: list[str] = field(default_factory=list[str])


class Scheduled(Exception):
    """A graph is scheduled, and need not be compiled."""


def counting(found: list[Launches], monkeypatch: pytest.MonkeyPatch) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A backend of torch's compiler that adds each graph's launches: forward, then backward."""

    def schedule(graph: Any) -> None:
        graph._update_scheduler()
        found.append(_launches(graph.scheduler.nodes))
        raise Scheduled

    def inner(gm: GraphModule, inputs: Sequence[Any], **about: Any) -> Any:
        computed = copy.deepcopy(gm)
        with (
            config.patch(cpu_backend="triton", force_disable_caches=True),
            pytest.raises((Scheduled, InductorError)) as error,
        ):
            compile_fx_inner(gm, inputs, **about)
        assert "Scheduled" in str(error)
        return _boxed(computed)

    monkeypatch.setattr(GraphLowering, "codegen", schedule)
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner)


def _launches(nodes: Sequence[Any]) -> Launches:
    found = Launches()
    for node in nodes:
        if isinstance(node, ExternKernelSchedulerNode):
            operator: Any = getattr(node.node, "op_overload", None)
            found.operators += [str(operator)] * (operator is not None)  # else it takes a result
        elif not isinstance(node, NopKernelSchedulerNode):
            found.fused.append(node.get_read_write_buffers_sizes())
    return found


def _boxed(gm: GraphModule) -> Any:
    def run(given: list[Any]) -> Any:
        return gm(*given)

    run._boxed_call = True  # pyright: ignore
    return run
