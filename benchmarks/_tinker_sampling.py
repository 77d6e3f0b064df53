"""A client that always has more to sample, with the Python of an environment that has the SDK: `.tinker/bin/python FILE`."""

# pyright: reportMissingImports=false, reportUnknownParameterType=false
# (`tinker` is installed in .tinker alone)

import threading

import tinker
from tinker import types

NUM_AT_ONCE, NUM_SAMPLES, MAX_TOKENS = 8, 32, 32


def keep_sampling(sampler: tinker.SamplingClient) -> None:
    prompt = types.ModelInput.from_ints([259, *b"reverse cabin", 256, 260])
    while True:
        sampler.sample(prompt, NUM_SAMPLES, types.SamplingParams(max_tokens=MAX_TOKENS, stop=[])).result()


def main() -> None:
    client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    threads = [threading.Thread(target=keep_sampling, args=(sampler,), daemon=True) for _ in range(NUM_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
