"""Runs several jobs at once on SkyRL's Tinker server, start and end included, with SkyRL's Python:
`python -m benchmarks.peers.skyrl_jobs FOLDER NAME...`.

Starts the server (`skyrl_server.py`), then one client thread a job: sample, forward_backward and optim_step, save for the
sampler, again. As SkyRL's documentation has it, forward_backward and optim_step are submitted together, and all prompts of a
step are sampled at once; no telemetry.
"""

# pyright: reportMissingImports=false
# (`tinker` is installed beside SkyRL alone)

import random
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from transformers import AutoTokenizer

from benchmarks.peers.settings import (
    ADAPTER,
    ADAPTER_CONFIG,
    Job,
    Row,
    Settings,
    advantages,
    batches,
    read_job,
    read_settings,
    reward,
)
from benchmarks.peers.skyrl_server import serving


def run(url: str, folder: Path, job: Job, settings: Settings) -> None:
    client = tinker.ServiceClient(base_url=url, api_key="tml-local").create_lora_training_client(
        base_model=settings.model, rank=settings.lora_rank, seed=job.seed, train_unembed=False
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    adam = types.AdamParams(
        learning_rate=settings.learning_rate,
        beta1=settings.adam_betas[0],
        beta2=settings.adam_betas[1],
        eps=settings.adam_eps,
    )
    clip = {"clip_low_threshold": 1 - settings.clip, "clip_high_threshold": 1 + settings.clip}
    seeds = random.Random(job.seed)
    for rows in batches(folder, job, settings):
        sampler = client.save_weights_and_get_sampling_client()
        data = sampled(sampler, tokenizer, rows, seeds, settings)
        trained = client.forward_backward(data, loss_fn="ppo", loss_fn_config=clip)
        stepped = client.optim_step(adam)
        trained.result()
        stepped.result()
    saved = client.save_weights_for_sampler(name="final").result()
    unpack(folder, saved.path, job)


def sampled(sampler: Any, tokenizer: Any, rows: list[Row], seeds: random.Random, settings: Settings) -> list[Any]:
    """The training data of one step: `group_size` answers to each row, with their advantages."""
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in rows
    ]
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=settings.group_size,
            sampling_params=types.SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                stop=[tokenizer.eos_token_id],
                seed=seeds.randrange(2**31 - settings.group_size),
            ),
        )
        for prompt in prompts
    ]
    data: list[Any] = []
    for prompt, row, future in zip(prompts, rows, futures, strict=True):
        answers = future.result().sequences
        texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
        values = advantages([reward(text, row["answer"], settings) for text in texts])
        data += [datum(prompt, answer, value) for answer, value in zip(answers, values, strict=True)]
    return data


def datum(prompt: list[int], answer: Any, advantage: float) -> Any:
    """`weights` leave the prompt out: the server divides a sequence's loss by their sum."""
    tokens = [*prompt, *answer.tokens]
    before, written = len(prompt) - 1, len(answer.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:], "int64"),
            "weights": tensor([0.0] * before + [1.0] * written, "float32"),
            "logprobs": tensor([0.0] * before + list(answer.logprobs), "float32"),
            "advantages": tensor([0.0] * before + [advantage] * written, "float32"),
        },
    )


def tensor(values: list[Any], dtype: str) -> Any:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def unpack(folder: Path, path: str, job: Job) -> None:
    """Copies the server's archive of `tinker://MODEL/NAME` into the job's folder."""
    model, name = path.removeprefix("tinker://").split("/")
    out = folder / job.name / "skyrl"
    out.mkdir()
    with tarfile.open(folder / "skyrl" / model / "sampler_weights" / f"{name}.tar.gz") as archive:
        for file in (ADAPTER, ADAPTER_CONFIG):
            found = archive.extractfile(next(m for m in archive.getmembers() if Path(m.name).name == file))
            assert found is not None
            (out / file).write_bytes(found.read())


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    settings = read_settings(folder)
    jobs = [read_job(folder, name) for name in names]
    python, rows, rank = Path(sys.executable), settings.rows, settings.lora_rank
    with (
        serving(python, folder, Path(settings.model), jobs=len(jobs), rows=rows, rank=rank) as server,
        ThreadPoolExecutor(len(jobs)) as clients,
    ):
        for done in [clients.submit(run, server.url, folder, job, settings) for job in jobs]:
            done.result()


if __name__ == "__main__":
    main()
