"""Chooses the embedded engine's backbone, by the settings and the base model, and loads it."""

from pathlib import Path

import structlog
import torch

from base_model.decoder import Decoder, fitting_kind
from base_model.device import find_device, prepare_cpu
from common.errors import InvalidInput
from common.models.stages import Stage
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.settings import RolloutSettings

log = structlog.get_logger()


def load_backbone(settings: RolloutSettings, folder: Path) -> EngineBackbone:
    """Loads the base model in a local folder; in deterministic mode our decoder, with exact bits.

    Raises InvalidInput for a base model that the embedded engine does not compute as it is meant.
    """
    device = find_device(settings.rollout_device, "MARLAAS_ROLLOUT_DEVICE")
    kind = settings.rollout_backbone
    if kind == "auto":
        kind = fitting_kind(folder, device, only_decoder=settings.deterministic, faster_on=("cpu", "cuda"))
    log.info("backbone_chosen", backbone=kind, device=str(device), dtype=settings.dtype)
    dtype = getattr(torch, settings.dtype)
    if kind == "decoder":
        decoder = Decoder.load(folder, device=str(device), dtype=dtype, max_context=settings.max_context)
        return FusedDecoder(decoder, exact=settings.deterministic, consume=True)
    from rollout_service.embedded.backbone.modules import load_modules  # imported here: transformers takes seconds

    try:
        return load_modules(folder, device=str(device), dtype=dtype, max_context=settings.max_context)
    except InvalidInput as error:
        raise InvalidInput(f"{error} (vLLM may sample from it: MARLAAS_ENGINE=vllm)") from error


def load_stage(settings: RolloutSettings, folder: Path, stage: Stage) -> FusedDecoder:
    """Loads the layers of one stage of a convoy, which all compute as deterministic mode does. Raises InvalidInput for a base model that
    our decoder does not know."""
    prepare_cpu(settings.rollout_threads)
    device, dtype = find_device(settings.rollout_device, "MARLAAS_ROLLOUT_DEVICE"), getattr(torch, settings.dtype)
    decoder = Decoder.load(folder, device=str(device), dtype=dtype, max_context=settings.max_context, stage=stage)
    return FusedDecoder(decoder, exact=True, consume=True)
