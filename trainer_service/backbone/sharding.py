"""Spreads a base model's weights over several processes: each keeps its part, and a layer is whole only while it computes.

FSDP2 (torch's `fully_shard`): a layer's weights are gathered before its forward and its backward, and given up after. Nothing of
the base has a gradient, so nothing is reduced; adapters are no parameters of the model, so each process has all of them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from trainer_service.backbone.modules import ModulesBackbone, scores_on


def shard(backbone: ModulesBackbone, mesh: DeviceMesh) -> ModulesBackbone:
    """Takes a backbone that is whole on the host; the same, of which this process holds its part, on its own device of the mesh.

    From now on all processes of the mesh compute the same passes over the layers, in step.
    """
    model = backbone.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    units = [*backbone.layers, embedding, head]
    if head.weight is embedding.weight:
        model.set_output_embeddings(embedding)
        units.pop()
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model.get_decoder(), mesh=mesh, reshard_after_forward=True)
    sharded = replace(backbone, whole=_gathered)
    return replace(sharded, max_scores=scores_on(sharded.device))


def bytes_held(backbone: ModulesBackbone) -> int:
    """Bytes of the weights that this process holds between two passes."""
    parts = ((p, getattr(p, "to_local", None)) for p in backbone.model.parameters())
    return sum(local.numel() * local.element_size() for p, part in parts for local in [part() if part else p])


@contextmanager
def _gathered(module: Any) -> Generator[None]:
    """Makes a module's weights whole for a moment; all processes do so at once."""
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
