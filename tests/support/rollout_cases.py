"""Requests, adapters and engines for the rollout tests."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from base_model.adapter import Adapter, init_adapter, save_adapter
from base_model.decoder import Decoder
from common.text.tokens import ChatTokenizer
from common.wire.messages import BASE, AdapterRef, LoraSpec, Sampling, TrajectoryRef, TurnRequest
from common.wire.transcript import shown, wrote
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Engine, Generated

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"


def adapter_of(
    seed: int, *, rank: int = 8, alpha: float = 16.0, targets: tuple[str, ...] = (), size: float = 0.05
) -> Adapter:
    """An adapter whose B is not zero, so that it matters."""
    initial = init_adapter(LoraSpec(rank, alpha, targets), decoder().linear_shapes(), seed)
    random = torch.Generator().manual_seed(seed)
    b = {name: torch.randn(t.shape, generator=random) * size for name, t in initial.b.items()}
    return Adapter(initial.spec, initial.a, b)


def files_of(seed: int, **options: Any) -> dict[str, bytes]:
    return save_adapter(adapter_of(seed, **options), "tiny")


def broken_files() -> dict[str, bytes]:
    """Finite weights, whose product is not."""
    adapter = adapter_of(1)
    return save_adapter(Adapter(adapter.spec, {k: v * 1e38 for k, v in adapter.a.items()}, adapter.b), "tiny")


def peft_model(folder: Path, files: dict[str, bytes] | None, base: Path = TINY) -> Any:
    """A base model, with an adapter if there is one, by transformers and PEFT; `folder` is written to."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    if files is None:
        return model
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return PeftModel.from_pretrained(model, str(folder)).eval()


@cache
def _loaded() -> Decoder:
    return Decoder.load(TINY)


def decoder() -> Decoder:
    torch.set_num_threads(1)
    return _loaded()


def model(*, exact: bool = False) -> FusedDecoder:
    """`exact`: as deterministic mode has it."""
    return FusedDecoder(decoder(), exact=exact)


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(TINY)


class NoEnd:
    """A tokenizer whose turns end by length alone."""

    end_of_turn_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._real = tokenizer()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._real.decode(ids, skip_special=skip_special)

    def to_json(self) -> str:
        return self._real.to_json()


def ref(job: str, version: int = 1) -> AdapterRef:
    return AdapterRef("tenant", job, version)


def prompt(text: str = "add 37+58") -> list[int]:
    return tokenizer().render([{"role": "user", "content": text}])


def request(
    adapter: AdapterRef = BASE,
    *,
    tokens: Sequence[int] | None = None,
    partial: tuple[Sequence[int], Sequence[float]] = ((), ()),
    group: int = 0,
    sample: int = 0,
    seed: int = 7,
    attempt: int = 0,
    turn: int = 0,
    name: str = "",
    purpose: Any = "train",
    reply_to: str = "",
    stream: bool = False,
    seeded: bool = True,
    untrained: bool = False,
    **sampling: Any,
) -> TurnRequest:
    given = prompt() if tokens is None else tokens
    return TurnRequest(
        id=name or f"{adapter}/{group}/{sample}/{turn}/{attempt}",
        tenant=adapter.tenant,
        job=adapter.job,
        partition=3,
        adapter=adapter,
        trajectory=TrajectoryRef(purpose, seed, group, sample, attempt),
        turn=turn,
        transcript=shown(given) + wrote(*partial),
        num_partial=len(partial[0]),
        sampling=Sampling(seeded=seeded, **sampling),
        reply_to=reply_to,
        stream=stream,
        untrained=untrained,
    )


def exact_limits(min_rows: int, **options: int) -> EngineLimits:
    """Limits as in deterministic mode, which keeps nothing between turns."""
    return EngineLimits(min_rows=min_rows, turn_bytes=0, exact=True, **options)


@contextlib.asynccontextmanager
async def running(
    *,
    limits: EngineLimits | None = None,
    ends: bool = True,
    adapters: Mapping[AdapterRef, dict[str, bytes]] | None = None,
    backbone: EngineBackbone | None = None,
) -> AsyncGenerator[TorchEngine]:
    """`ends`: whether the end-of-turn token ends a turn. `backbone`: our decoder, if it is left out."""
    computes = backbone or model(exact=limits is not None and limits.exact)
    engine = TorchEngine(computes, tokenizer() if ends else NoEnd(), limits=limits)
    await engine.start()
    try:
        for adapter, files in (adapters or {}).items():
            await engine.load_files(adapter, files)
        yield engine
    finally:
        await engine.stop()


def beat() -> None:
    return None


async def one(engine: Engine, asked: TurnRequest) -> Generated:
    return await engine.generate(asked, beat=beat)


def nearly(found: Generated, expected: Generated) -> bool:
    """The same tokens; log-probs may differ in their last digits, as rounding may in other company."""
    return found.tokens == expected.tokens and np.allclose(found.logprobs, expected.logprobs, atol=1e-4)


def bits(generated: Generated) -> tuple[list[int], bytes]:
    return generated.tokens, np.array(generated.logprobs, np.float32).tobytes()
