"""N clients of the Tinker protocol, as threads of one process: `.tinker/bin/python benchmarks/_tinker_clients.py N STEPS`.

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

import tinker
from tinker import types

PROMPTS, SAMPLES, TOKENS, UNCOUNTED = 4, 4, 32, 2


def step(client: tinker.TrainingClient, rng: random.Random) -> list[float]:
    times = [time.monotonic()]
    sampler = client.save_weights_and_get_sampling_client().result()
    times.append(time.monotonic())
    prompts = [[259, *f"add {rng.randrange(100)}+{rng.randrange(100)}".encode(), 256, 260] for _ in range(PROMPTS)]
    how = types.SamplingParams(max_tokens=TOKENS, stop=[])
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, how) for prompt in prompts]
    found = [
        (prompt, each) for prompt, future in zip(prompts, asked, strict=True) for each in future.result().sequences
    ]
    times.append(time.monotonic())
    data: list[types.Datum] = []
    for prompt, sample in found:
        tokens, before = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
        advantages = [*before, *[rng.choice([-1.0, 1.0])] * len(sample.tokens)]
        inputs = {"target_tokens": tokens[1:], "logprobs": [*before, *sample.logprobs], "advantages": advantages}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    gradient = client.forward_backward(data, "importance_sampling")
    update = client.optim_step(types.AdamParams(learning_rate=1e-5))
    gradient.result()
    update.result()
    times.append(time.monotonic())
    return times


def client(number: int, steps: int, told: dict[int, list[list[float]]]) -> None:
    trained, rng = tinker.ServiceClient().create_lora_training_client("tiny", rank=8).result(), random.Random(number)
    told[number] = [step(trained, rng) for _ in range(steps + UNCOUNTED)][UNCOUNTED:]


def main() -> None:
    warnings.simplefilter("ignore")
    num, steps = int(sys.argv[1]), int(sys.argv[2])
    told: dict[int, list[list[float]]] = {}
    threads = [threading.Thread(target=client, args=(number, steps, told)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([told[number] for number in range(num)]))


if __name__ == "__main__":
    main()
