"""A client of the Tinker protocol with small steps, or one with large ones that ends when it is killed, with the Python of an environment
that has the SDK: `.tinker/bin/python FILE small STEPS UNCOUNTED`, `.tinker/bin/python FILE large`.

The small one prints, as JSON, when each counted step began, when it had its samples and when it ended; the large one a line a step.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false
# (`tinker` is installed in .tinker alone)

import json
import random
import sys
import time
import warnings

import tinker
from tinker import types

PROMPTS, SAMPLES, SAMPLED = 2, 4, 16
SMALL, SMALL_ROWS = 62, 8
LARGE, LARGE_ROWS = 1024, 44
"""Tokens of a row, and rows of a step: 496 and 45,056 tokens."""
RATE = types.AdamParams(learning_rate=1e-5)


def rows(rng: random.Random, num: int, length: int) -> list[types.Datum]:
    found: list[types.Datum] = []
    for _ in range(num):
        tokens = [rng.randrange(200) for _ in range(length + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        found.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return found


def small(client: tinker.TrainingClient, rng: random.Random) -> list[float]:
    """Times at which the step began, had its samples, and ended: seconds."""
    times = [time.monotonic()]
    sampler = client.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=SAMPLED, stop=[], seed=rng.randrange(2**30))
    prompts = [types.ModelInput.from_ints([259, *b"add 37+58", 256, 260]) for _ in range(PROMPTS)]
    for asked in [sampler.sample(prompt, SAMPLES, how) for prompt in prompts]:
        asked.result()
    times.append(time.monotonic())
    passed = client.forward_backward(rows(rng, SMALL_ROWS, SMALL), "cross_entropy")
    step = client.optim_step(RATE)
    passed.result()
    step.result()
    return [*times, time.monotonic()]


def keep_training(client: tinker.TrainingClient, rng: random.Random) -> None:
    """The next step is always sent before the one before it has ended."""
    open_steps = []
    data = rows(rng, LARGE_ROWS, LARGE)
    while True:
        client.forward_backward(data, "cross_entropy")
        open_steps.append(client.optim_step(RATE))
        if len(open_steps) == 2:
            open_steps.pop(0).result()
            print("step", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    client, rng = tinker.ServiceClient().create_lora_training_client("tiny", rank=8).result(), random.Random(1)
    if sys.argv[1] == "large":
        keep_training(client, rng)
    steps, uncounted = int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([small(client, rng) for _ in range(steps + uncounted)][uncounted:]))


if __name__ == "__main__":
    main()
