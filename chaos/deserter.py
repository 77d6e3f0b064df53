"""A client of the Tinker protocol that never ends anything: `python -m chaos.deserter`, until it is killed.

It reads an API's url and a key from its first line of input, prints the session that it begins, and then has runs under way of each
kind: one that steps and saves, one that waits for a number which never comes, one that is filled with operations, and samples.
"""

import asyncio
import sys
from typing import Any

import httpx

NUM_RUNS = 3
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [259, *b"add 1+2", 256, 260]}]}
TARGETS = [*b"add 1+2", 256, 260, *b"3"]
DATUM = {"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": {"data": TARGETS, "dtype": "int64"}}}
PASS = {"loss_fn": "cross_entropy", "data": [DATUM] * 8}
PAUSE_S = 0.02


class Deserter:
    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-API-Key": f"tml-{key}"}, trust_env=False)

    async def ask(self, name: str, **body: Any) -> Any:
        """Whatever is answered, sooner or later."""
        while True:
            try:
                answer = await self._http.post(f"/{name}", json=body)
                if answer.status_code < 500:
                    return answer.json()
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.3)

    async def desert(self) -> None:
        session = (await self.ask("create_session", tags=[], user_metadata={"name": "\x1b[2J../../{{"}))["session_id"]
        sys.stdout.write(f"{session}\n")
        sys.stdout.flush()
        for number in range(NUM_RUNS):
            model = {"base_model": "tiny", "lora_config": {"rank": 4}}
            await self.ask("create_model", session_id=session, model_seq_id=number, **model)
        steps, holes, fills = (f"{session}:train:{number}" for number in range(NUM_RUNS))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._step(steps))
            group.create_task(self._leave_holes(holes))
            group.create_task(self._fill(fills))
            group.create_task(self._sample(session))

    async def _pass(self, run: str, seq: int) -> None:
        await self.ask("forward_backward", model_id=run, seq_id=seq, forward_backward_input=PASS)

    async def _step(self, run: str) -> None:
        seq = 1
        while True:
            await self._pass(run, seq)
            await self.ask("optim_step", model_id=run, seq_id=seq + 1, adam_params={"learning_rate": 1e-4})
            await self.ask("save_weights_for_sampler", model_id=run, seq_id=seq + 2, sampling_session_seq_id=seq)
            await self.ask("save_weights", model_id=run, seq_id=seq + 3, path="mine", overwrite=True, ttl_seconds=3600)
            seq += 4
            await asyncio.sleep(0.5)

    async def _leave_holes(self, run: str) -> None:
        for seq in (1, 2, 4, 5, 9):
            await self._pass(run, seq)
        await asyncio.Event().wait()

    async def _fill(self, run: str) -> None:
        """Also what is refused is sent."""
        for seq in range(1, 400):
            await self._pass(run, seq)
            await asyncio.sleep(PAUSE_S)

    async def _sample(self, session: str) -> None:
        how = {"prompt": PROMPT, "num_samples": 8, "sampling_params": {"max_tokens": 64}}
        made = await self.ask(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
        )
        for seq in (0, 1, 2, 7, 8):
            await self.ask("asample", sampling_session_id=made.get("sampling_session_id"), seq_id=seq, **how)


if __name__ == "__main__":
    asyncio.run(Deserter(*sys.stdin.readline().split()).desert())
