"""Calls that a tenant keeps under way, until cancelled, while others are measured."""

import asyncio
import sys

from harness.live import Api

ASK = """import http.client, sys, threading
def ask():
    connection = http.client.HTTPConnection(sys.argv[1])
    while True:
        connection.request("GET", f"/v1{sys.argv[4]}", headers={"Authorization": f"Bearer {sys.argv[2]}"})
        connection.getresponse().read()
for _ in range(int(sys.argv[3])):
    threading.Thread(target=ask).start()"""
"""The program of a process: it shall take no time of the one that measures."""
UNUSED = 271
"""A token that no turn of `tiny` ends with."""


async def keep_asking(api: Api, asked: tuple[int, str]) -> None:
    """`asked`: how many at once, and the path."""
    command = [sys.executable, "-c", ASK, api.base_url.removeprefix("http://"), api.key, *map(str, asked)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await process.wait()
    finally:
        process.kill()


async def keep_sampling(api: Api, num_tokens: int) -> None:
    """64 samples at a time, of so many tokens each."""
    url, headers = f"{api.base_url}/api/v1", {"X-API-Key": f"tml-{api.key}"}
    sampling = {"max_tokens": num_tokens, "stop": [UNUSED]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(b"count")}]}
    body = {"base_model": "tiny", "num_samples": 64, "prompt": prompt, "sampling_params": sampling}
    while True:
        asked = {"request_id": (await api.post(f"{url}/asample", body, **headers))["request_id"]}
        try:
            while (await api.http.post(f"{url}/retrieve_future", json=asked, headers=headers)).status_code == 408:
                pass
        finally:
            await api.post(f"{url}/cancel_future", asked, **headers)
