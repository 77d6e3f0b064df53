"""Chooses what computes the base model, by the settings and the base model, and loads it."""

from functools import partial
from pathlib import Path

import structlog
import torch

from base_model.decoder import Decoder, directly, fitting_kind
from base_model.device import find_device
from common.errors import InvalidInput
from trainer_service.backbone.interface import Backbone
from trainer_service.backbone.sequences import DecoderBackbone, checkpointed
from trainer_service.settings import TrainerSettings

log = structlog.get_logger()


def load_backbone(settings: TrainerSettings, folder: Path) -> Backbone:
    """Loads a local base model. Raises InvalidInput for one that cannot be computed as it is meant."""
    device = find_device(settings.trainer_device, "MARLAAS_TRAINER_DEVICE")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(settings.trainer_memory_fraction, device)
    kind = settings.trainer_backbone
    if kind == "auto":
        kind = fitting_kind(folder, device, only_decoder=settings.deterministic)
    log.info("backbone_chosen", backbone=kind, device=str(device), dtype=settings.dtype)
    dtype = getattr(torch, settings.dtype)
    if kind == "decoder" and settings.kernels:
        raise InvalidInput(
            f"MARLAAS_TRAINER_KERNELS={settings.trainer_kernels} is for the transformers backbone on CUDA, and here our decoder "
            f"computes on {device.type}"
        )
    if kind == "decoder":
        return _decoder(settings, folder, device, dtype)
    return _modules(settings, folder, device, dtype)


def _decoder(settings: TrainerSettings, folder: Path, device: torch.device, dtype: torch.dtype) -> DecoderBackbone:
    decoder = Decoder.load(folder, device=str(device), dtype=dtype, max_context=settings.max_context)
    return DecoderBackbone(decoder, checkpointed if settings.trainer_checkpointing else directly)


def _modules(settings: TrainerSettings, folder: Path, device: torch.device, dtype: torch.dtype) -> Backbone:
    # imported here: transformers takes seconds
    from trainer_service.backbone.device_kernels.kernel_choice import chosen_kernels
    from trainer_service.backbone.loading import load_modules

    load = partial(load_modules, folder, device=str(device), dtype=dtype, max_context=settings.max_context)
    kernels, backbone = chosen_kernels(settings, device), None
    while backbone is None:
        try:
            backbone = load(kernels=kernels)
        except InvalidInput as error:  # also if they compute the first few tokens wrongly
            if settings.kernels or not kernels:
                raise
            *fewer, left_out = kernels
            log.warning("device_kernels_left_out", kernels=left_out, reason=str(error))
            kernels = tuple(fewer)
    log.info("device_kernels_chosen", kernels=kernels)
    return backbone.checkpointing(len(backbone.layers)) if settings.trainer_checkpointing else backbone
