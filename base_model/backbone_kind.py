"""Chooses what computes a base model where the setting leaves it open: our decoder, or transformers' own modules."""

from pathlib import Path

import structlog
import torch

from base_model.decoder import DecoderConfig
from common.errors import InvalidInput

log = structlog.get_logger()


def fitting_kind(folder: Path, device: torch.device, *, only_decoder: bool) -> str:
    """The decoder where only it does what is asked, and on a CPU for the families that it knows; else `transformers`."""
    if only_decoder:
        return "decoder"
    if device.type != "cpu":
        return "transformers"
    try:
        DecoderConfig.load(folder)
    except InvalidInput as error:
        log.info("decoder_refused", reason=str(error))
        return "transformers"
    return "decoder"
