"""Spreads a base model's weights over processes: each keeps a part, and a layer is whole only while it computes.

FSDP2 (torch's `fully_shard`) gathers a layer's weights before its forward and its backward, and frees them after. The base
has no gradient, so nothing is reduced; adapters are no parameters of the model, so each process has all of them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from base_model.device import give_back_memory
from trainer_service.backbone.modules import ModulesBackbone, scores_on
from trainer_service.backbone.shortage import Shortage


def shard(backbone: ModulesBackbone, mesh: DeviceMesh) -> ModulesBackbone:
    """Takes a backbone that is whole on the host; returns it with this process's part, on its own device of the mesh.
    From now on all processes of the mesh make the same passes, in step."""
    model = backbone.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    units = [*backbone.layers, embedding, head]
    if head.weight is embedding.weight:
        model.set_output_embeddings(embedding)
        units.pop()
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model.get_decoder(), mesh=mesh, reshard_after_forward=True)
    shortage = Shortage()
    for layer in backbone.layers:
        shortage.guard(layer)
    sharded = replace(backbone, whole=partial(_gathered, shortage), shortage=shortage)
    return replace(sharded, max_scores=scores_on(sharded.device))


def forget_pass(backbone: ModulesBackbone) -> str:
    """Readies a sharded backbone after a pass that counts nowhere and whose graph is gone. Returns why memory ran out here,
    or ""."""
    assert backbone.shortage
    reason, backbone.shortage.reason = backbone.shortage.reason, ""
    backbone.model.get_decoder().reset_iter_state()
    give_back_memory()
    return reason


def bytes_held(backbone: ModulesBackbone) -> int:
    """Bytes of the weights that this process holds between two passes."""
    parts = ((p, getattr(p, "to_local", None)) for p in backbone.model.parameters())
    return sum(local.numel() * local.element_size() for p, part in parts for local in [part() if part else p])


@contextmanager
def _gathered(shortage: Shortage, module: Any) -> Generator[None]:
    """Makes a module's weights whole for a moment, in all processes at once. Notes a shortage of memory."""
    module.unshard()
    try:
        with shortage.noted():
            yield
    finally:
        module.reshard()
