"""N clients of the Tinker protocol, as threads of one process, with the Python of an SDK's environment:
`.tinker/bin/python benchmarks/_tinker_clients.py N STEPS MODEL UNCOUNTED`.

Prints, as JSON, for each client and counted step, when it began and when each of its parts ended.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false
# (`tinker` is installed in .tinker alone)

import json
import random
import sys
import threading
import time
import warnings
from typing import Any

import tinker
from tinker import types

PROMPTS, SAMPLES, TOKENS, RANK = 4, 4, 32, 8


def step(client: tinker.TrainingClient, rng: random.Random) -> list[float]:
    times = [time.monotonic()]
    sampler = saved(client)
    times.append(time.monotonic())
    prompts = [
        [259, *f"add {rng.randrange(10, 100)}+{rng.randrange(10, 100)}".encode(), 256, 260] for _ in range(PROMPTS)
    ]
    how = types.SamplingParams(max_tokens=TOKENS, stop=[], seed=rng.randrange(2**30))
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, how) for prompt in prompts]
    found = [
        (prompt, each) for prompt, future in zip(prompts, asked, strict=True) for each in future.result().sequences
    ]
    times.append(time.monotonic())
    data: list[types.Datum] = []
    for prompt, sample in found:
        tokens, before = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": tensor(tokens[1:], "int64"),
            "logprobs": tensor([*before, *sample.logprobs], "float32"),
            "advantages": tensor([*before, *[rng.choice([-1.0, 1.0])] * len(sample.tokens)], "float32"),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    gradient = client.forward_backward(data, "importance_sampling")
    update = client.optim_step(types.AdamParams(learning_rate=1e-5))
    gradient.result()
    update.result()
    times.append(time.monotonic())
    return times


def saved(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """The sampler of what the client has trained; the SDK gives it at once, or as a future since 0.30."""
    found: Any = client.save_weights_and_get_sampling_client()
    return found.result() if hasattr(found, "result") else found


def tensor(values: list[Any], dtype: Any) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def client(number: int, steps: int, model: str, uncounted: int, told: dict[int, list[list[float]]]) -> None:
    made: Any = tinker.ServiceClient().create_lora_training_client(model, rank=RANK, train_unembed=False)
    trained, rng = made.result() if hasattr(made, "result") else made, random.Random(number)
    told[number] = [step(trained, rng) for _ in range(steps + uncounted)][uncounted:]


def main() -> None:
    warnings.simplefilter("ignore")
    num, steps, model, uncounted = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    told: dict[int, list[list[float]]] = {}
    threads = [threading.Thread(target=client, args=(n, steps, model, uncounted, told)) for n in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([told[number] for number in range(num)]))


if __name__ == "__main__":
    main()
