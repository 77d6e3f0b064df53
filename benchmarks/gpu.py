"""Measures on a GPU fused training and decoding in the shape of a larger model, and how much of the device they use for what.

    python -m benchmarks.gpu [--shape qwen3-0.6b] [--jobs 1 8 32] [--repetitions 5] [--compile] [--json FILE]
    python -m benchmarks.gpu --backbone transformers                  # trains with transformers' modules, rows packed
    python -m benchmarks.gpu --device cpu --shape tiny --jobs 1 2     # tries the benchmark itself

Weights are random, in bfloat16; adapters have rank 8 on all linear layers. Answers have lengths log-normal with median 16 and 99th
percentile 160 tokens. Training: one step of each of N jobs, 4 groups of 8 rows each, fused, against N separate steps; and with 2 rows
of 16 tokens each; and the most memory that a fused step takes on a GPU, weights included. MFU: floating-point operations of what
is executed, less the share of padding, over what the device can do.
Decoding: 64 rows of N adapters. MBU: bytes that each step must read (weights, adapters at work, keys and values) over what the
device can read. The peaks of some devices are known; else give `--peak-tflops` and `--peak-gbs`. Without a GPU nothing is measured.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from base_model.adapter import load_adapter
from base_model.decoder import Decoder, DecoderConfig
from base_model.device import find_device, prepare_cpu
from base_model.stacked import FusedAdapter, fuse
from benchmarks._report import Goal, Report, console, in_turns, make_table, parser, positive, ratio, show, timed
from benchmarks.fused import NUM_JOBS, SHAPES, Job, all_active, fused, make_jobs
from benchmarks.paper.lengths import LONGEST, answer_tokens
from benchmarks.rollout import adapter_files, request
from benchmarks.training import LORA, Workload, initial_state, make_step
from common.messages import AdapterRef, TrajectoryRef
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.seats import TurnRow
from trainer_service.backbone.interface import Backbone
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.memory import fit
from trainer_service.packing import Budget
from trainer_service.training import Trainer

ROWS = 64
PROMPT = 64
TOP = 8
PROFILED = 32
"""Steps of decoding: a profiler keeps every call."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a base model."""

    config: DecoderConfig
    inner: int  # width between gate and down


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, vocab: int, inner: int) -> Shape:
    config = DecoderConfig(layers, hidden, heads, kv_heads, head_dim, vocab, 4096, 1e6, 1e-6, tied=True)
    return Shape(config, inner)


SHAPES_OF_BASES = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 151_936, 3072),
    "tiny": _qwen3(4, 128, 4, 2, 32, 272, 384),
}
PEAKS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.04e12)}
"""Peaks from the data sheets (SXM): bfloat16 operations a second without sparsity, bytes a second."""


def random_decoder(shape: Shape, device: torch.device, dtype: torch.dtype) -> Decoder:
    c, generator = shape.config, torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype) * 0.02

    weights = {"embed_tokens.weight": drawn(c.vocab, c.hidden), "norm.weight": _ones(c.hidden, device, dtype)}
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linear = {
        "self_attn.q_proj": (query, c.hidden),
        "self_attn.k_proj": (key, c.hidden),
        "self_attn.v_proj": (key, c.hidden),
        "self_attn.o_proj": (c.hidden, query),
        "mlp.gate_proj": (shape.inner, c.hidden),
        "mlp.up_proj": (shape.inner, c.hidden),
        "mlp.down_proj": (c.hidden, shape.inner),
    }
    norms = {"input_layernorm": c.hidden, "post_attention_layernorm": c.hidden}
    norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for layer in range(c.num_layers):
        weights |= {f"layers.{layer}.{name}.weight": drawn(*size) for name, size in linear.items()}
        weights |= {f"layers.{layer}.{name}.weight": _ones(size, device, dtype) for name, size in norms.items()}
    return Decoder(c, weights)


def random_modules(decoder: Decoder) -> Backbone:
    """transformers' modules with the weights of a decoder, not copied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # here: a lent GPU may lack them

    from trainer_service.backbone.attention import NAME
    from trainer_service.backbone.modules import ModulesBackbone

    c = decoder.config
    fields: dict[str, Any] = {
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": decoder.weights["layers.0.mlp.up_proj.weight"].shape[0],
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attn_implementation": NAME,
    }
    with torch.device(decoder.device):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.to(decoder.embedding.dtype)
    model.get_decoder().load_state_dict(decoder.weights, assign=True)
    model.tie_weights()
    return ModulesBackbone.of(model, c.context)


def _ones(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(size, device=device, dtype=dtype)


# ---- training -------------------------------------------------------------------------------------------------------


def heavy_tailed(trainer: Trainer, num_jobs: int) -> list[Job]:
    """A step of each of several jobs."""
    work = Workload("heavy tail", 4, 8, (PROMPT, PROMPT + 1), (1, 2))
    jobs: list[Job] = []
    for job in range(num_jobs):
        step = make_step(work, job, num_written=lambda g, s, job=job: answer_tokens(TrajectoryRef("train", job, g, s)))
        jobs.append((all_active(step), initial_state(trainer, job, LORA)))
    return jobs


def measure_training(trainer: Trainer, jobs: list[Job], repetitions: int) -> dict[str, float]:
    """Fused and separate steps in turn; operations and padding of one fused step."""
    device = trainer.backbone.device
    runs: dict[str, Callable[[], object]] = {
        "fused": lambda: fused(trainer, jobs),
        "separate": lambda: [trainer.step(*job, lambda: None) for job in jobs],
    }
    seconds = in_turns({name: timed(done(work, device)) for name, work in runs.items()}, repetitions)
    peak = _peak_bytes(device, runs["fused"])
    with FlopCounterMode(display=False) as counter:
        metrics = [trained.metrics for trained in fused(trainer, jobs)]
    forward = [m["forward_tokens"] or 0.0 for m in metrics]
    padding = sum(tokens * (m["padding_share"] or 0.0) for tokens, m in zip(forward, metrics, strict=True)) / sum(
        forward
    )
    fused_s = statistics.median(seconds["fused"])
    num_tokens = sum(len(step.rows.tokens) for step, _ in jobs)
    return {
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / fused_s,
        "to_separate": ratio(seconds["separate"], seconds["fused"]),
        "flops_per_s": counter.get_total_flops() * (1 - padding) / fused_s,
        "padding": padding,
        "peak_bytes": peak,
    }


def _peak_bytes(device: torch.device, work: Callable[[], object]) -> float:
    """The most memory of a GPU that is taken at one time; NaN elsewhere."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return float(torch.cuda.max_memory_allocated(device))


# ---- decoding -------------------------------------------------------------------------------------------------------


def random_adapters(decoder: Decoder, num: int) -> list[FusedAdapter]:
    shapes, layers = decoder.linear_shapes(), decoder.config.num_layers
    files = (adapter_files(decoder, seed) for seed in range(num))
    return [fuse(load_adapter(each), shapes, layers, like=decoder.embedding) for each in files]


def rows_of(adapters: Sequence[FusedAdapter]) -> list[TurnRow]:
    """ROWS turns, evenly over the adapters, of the law's lengths, with prompts of their own."""
    rng = np.random.default_rng(0)
    rows: list[TurnRow] = []
    for number in range(ROWS):
        job = number % len(adapters)
        num_tokens = answer_tokens(TrajectoryRef("train", 1, number // 8, number % 8))
        asked = request(AdapterRef("bench", f"job{job}", 1), rng.integers(0, 250, PROMPT), number, num_tokens)
        rows.append(TurnRow(asked, adapters[job], handle=None))
    return rows


def decode(decoder: Decoder, rows: Sequence[TurnRow], num_steps: int = LONGEST) -> float:
    """Seconds of the forwards after the first, prefills left out."""
    batch = RunningRows(decoder, end_ids=(), decode=lambda _: "", limits=EngineLimits(slots=ROWS, kv_bytes=8 << 30))
    with torch.inference_mode():
        for row in rows:
            batch.add(TurnRow(row.request, row.adapter, handle=None))
        batch.advance()
        first_s = batch.meter.decode_s
        for _ in range(num_steps):
            if batch.has_work:
                batch.advance()
    return batch.meter.decode_s - first_s


def bytes_read(decoder: Decoder, rows: Sequence[TurnRow]) -> float:
    """Bytes that all forwards but the first have to read at least."""
    config, size = decoder.config, decoder.embedding.element_size()
    row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    shapes = decoder.linear_shapes().values()
    weights = size * (sum(out * width for out, width in shapes) + decoder.head.numel())
    steps_of: Counter[FusedAdapter] = Counter()
    total = 0.0
    for row in rows:
        steps = row.request.sampling.max_tokens - 1
        total += row_bytes * sum(row.request.num_prompt + t for t in range(1, steps + 1))
        assert row.adapter is not None, "every row has an adapter"
        steps_of[row.adapter] = max(steps_of[row.adapter], steps)
    return total + weights * max(steps_of.values()) + sum(a.num_bytes * n for a, n in steps_of.items())


def measure_decoding(decoder: Decoder, adapters: Sequence[FusedAdapter], repetitions: int) -> dict[str, float]:
    """Decodes with one adapter and with all in turn."""
    alone, mixed = rows_of(adapters[:1]), rows_of(adapters)
    num_tokens = sum(row.request.sampling.max_tokens - 1 for row in mixed)
    decode(decoder, mixed)
    seconds = [(decode(decoder, alone), decode(decoder, mixed)) for _ in range(repetitions)]
    mixed_s = statistics.median(s for _, s in seconds)
    return {
        "tokens_per_s": num_tokens / mixed_s,
        "to_one_adapter": statistics.median(one / all_ for one, all_ in seconds),
        "bytes_per_s": bytes_read(decoder, mixed) / mixed_s,
    }


# ---- the device -----------------------------------------------------------------------------------------------------


def done(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Waits for the device after the work, so that a clock around it counts all of it; and now, for what came before."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def do() -> None:
        work()
        wait()

    wait()
    return do


def busiest(run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Operations by their share of the device's time, the largest first."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        run()
    events: list[Any] = list(profiled.key_averages())
    kind = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    shares = Counter({event.key: getattr(event, kind) for event in events})
    return [(name[:60], 100 * took / max(1.0, shares.total())) for name, took in shares.most_common(TOP)]


def peaks(device: torch.device) -> tuple[float, float]:
    """Operations and bytes a second; NaN for a device that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAKS.items() if known in name), (float("nan"), float("nan")))


def measure(
    decoder: Decoder, jobs: Sequence[int], repetitions: int, tokens: int, backbone: Backbone | None = None
) -> dict[str, Any]:
    """`backbone`: trains, instead of the decoder."""
    trainer = Trainer(backbone or DecoderBackbone(decoder), Budget(tokens))
    fit(trainer, 0)
    adapters = random_adapters(decoder, max(jobs))
    found: dict[str, Any] = {"training": {}, "decoding": {}}
    for n in jobs:
        found["training"][n] = measure_training(trainer, heavy_tailed(trainer, n), repetitions)
        found["decoding"][n] = measure_decoding(decoder, adapters[:n], repetitions)
    found["small"] = measure_training(trainer, make_jobs(trainer, SHAPES[0], max(jobs)), repetitions)
    last, rows = heavy_tailed(trainer, max(jobs)), rows_of(adapters)
    found["busiest"] = {
        "a fused step": busiest(lambda: fused(trainer, last), decoder.device),
        "decoding": busiest(lambda: decode(decoder, rows, PROFILED), decoder.device),
    }
    return found


TRAINING = ("", "tokens", "tokens/s", "x separate", "TFLOP/s", "MFU %", "padding %", "peak GiB")


def tables(found: dict[str, Any], peak: tuple[float, float]) -> list[Any]:
    training = [
        (
            f"N = {n}",
            f["tokens"],
            f["tokens_per_s"],
            f["to_separate"],
            f["flops_per_s"] / 1e12,
            100 * f["flops_per_s"] / peak[0],
            100 * f["padding"],
            f["peak_bytes"] / 2**30,
        )
        for n, f in found["training"].items()
    ]
    decoding = [
        (f"N = {n}", f["tokens_per_s"], f["to_one_adapter"], f["bytes_per_s"] / 1e9, 100 * f["bytes_per_s"] / peak[1])
        for n, f in found["decoding"].items()
    ]
    return [
        make_table("Fused training", TRAINING, training),
        make_table(f"Decoding {ROWS} rows", ("", "tokens/s", "x one adapter", "GB/s", "MBU %"), decoding),
        *(make_table(f"Time of {what}", ("", "%"), shares) for what, shares in found["busiest"].items()),
    ]


def goals(found: dict[str, Any]) -> list[Goal]:
    most = f"{NUM_JOBS} jobs of 2 rows of 16 tokens"
    return [
        Goal(f"fused to separate steps, {most}", found["small"]["to_separate"], 4.0, " x"),
        Goal(f"decoding with {NUM_JOBS} adapters to one", found["decoding"][NUM_JOBS]["to_one_adapter"], 0.9, " x"),
    ]


def notes(peak: tuple[float, float], *, judged: bool) -> list[str]:
    """Reasons why columns are empty, or goals are not judged."""
    found: list[str] = []
    if np.isnan(peak).any():
        found.append(
            "MFU and MBU need the device's peaks: --peak-tflops and --peak-gbs fill the columns that are empty"
        )
    if not judged:
        found.append(f"the goals are for a GPU with {NUM_JOBS} jobs")
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--shape", choices=SHAPES_OF_BASES, default="qwen3-0.6b")
    options.add_argument("--jobs", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    options.add_argument("--repetitions", type=positive, default=5, help="default 5")
    options.add_argument("--tokens", type=positive, default=16_384, help="of a micro-batch, if memory allows")
    options.add_argument("--compile", action="store_true", help="as MARLAAS_TRAINER_COMPILE")
    options.add_argument("--backbone", choices=("decoder", "transformers"), default="decoder", help="what trains")
    options.add_argument("--peak-tflops", type=float, help="of the device, in bfloat16")
    options.add_argument("--peak-gbs", type=float, help="of the device's memory")
    given = options.parse_args()
    if max(given.jobs) > NUM_JOBS:
        options.error(f"argument --jobs: {NUM_JOBS} at most")
    if given.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing was measured (--device cpu --shape tiny tries the benchmark itself)")
        return
    device = find_device(given.device, "--device")
    prepare_cpu(1)
    decoder = random_decoder(SHAPES_OF_BASES[given.shape], device, torch.bfloat16)
    if given.compile:
        decoder.compile()
    backbone = random_modules(decoder) if given.backbone == "transformers" else None
    found = measure(decoder, given.jobs, given.repetitions, given.tokens, backbone)
    known = peaks(device)
    peak = (
        1e12 * given.peak_tflops if given.peak_tflops else known[0],
        1e9 * given.peak_gbs if given.peak_gbs else known[1],
    )
    judged = device.type == "cuda" and NUM_JOBS in given.jobs
    shown = Report(tables(found, peak), found, goals(found) if judged else [], notes(peak, judged=judged))
    show(shown, given.json)


if __name__ == "__main__":
    main()
