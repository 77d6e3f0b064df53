"""The Tinker protocol by hand: what the SDK never sends, and one request at a time."""

from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from manager_service.http.tinker.wire import tinker_pb2 as pb
from tests.support.api_server import ApiServer

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass
class TinkerClient:
    """One tenant's client. Answers are not checked."""

    http: httpx.AsyncClient
    key: str

    async def post(self, name: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/api/v1/{name}", json=body, headers={"X-API-Key": f"tml-{self.key}"}, timeout=120)

    async def get(self, name: str) -> httpx.Response:
        return await self.http.get(f"/api/v1/{name}", headers={"X-API-Key": f"tml-{self.key}"})

    async def delete(self, name: str) -> httpx.Response:
        return await self.http.delete(f"/api/v1/{name}", headers={"X-API-Key": f"tml-{self.key}"}, timeout=120)

    async def put(self, name: str, **body: Any) -> httpx.Response:
        return await self.http.put(f"/api/v1/{name}", json=body, headers={"X-API-Key": f"tml-{self.key}"}, timeout=120)

    async def send(self, body: bytes, **headers: str) -> httpx.Response:
        """A pass over data."""
        told = PROTOBUF | {"X-API-Key": f"tml-{self.key}"} | headers
        return await self.http.post("/api/v1/forward_backward", content=body, headers=told, timeout=120)

    async def retrieve(self, future: str) -> httpx.Response:
        headers = {"X-API-Key": f"tml-{self.key}"}
        return await self.http.post(
            "/api/v1/retrieve_future", json={"request_id": future}, headers=headers, timeout=120
        )

    async def done(self, name: str, **body: Any) -> dict[str, Any]:
        """The result of an operation that is sent, or of what answers with a future."""
        sent = await self.post(name, **body)
        assert sent.status_code == 200, sent.text
        return result_of(await self.retrieve(sent.json()["request_id"]))

    async def sampler(self, session: str, number: int = 0, **of: Any) -> str:
        """The name of a new sampler, of the base model unless `of` says another."""
        body = {"session_id": session, "sampling_session_seq_id": number} | (of or {"base_model": "tiny"})
        made = await self.post("create_sampling_session", **body)
        assert made.status_code == 200, made.text
        return made.json()["sampling_session_id"]

    async def session(self) -> str:
        return (await self.post("create_session", tags=[], sdk_version="0.38.0")).json()["session_id"]

    async def run(self, session: str, number: int = 0, **more: Any) -> str:
        """The name of a new run."""
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny"} | more
        made = await self.post("create_model", **body)
        assert made.status_code == 200, made.text
        return f"{session}:train:{number}"


async def client_of(server: ApiServer, tenant: str = "") -> TinkerClient:
    """A client of the first tenant, or of another that is made."""
    if not tenant:
        return TinkerClient(server.http, server.key)
    other = await server.new_tenant(tenant)
    return TinkerClient(server.http, other.api_key)


def samples_of(answer: httpx.Response) -> list[list[int]]:
    """The tokens of each sample."""
    sequences = pb.SampleResponse.FromString(answer.content).sequences
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in sequences]


def result_of(answer: httpx.Response) -> dict[str, Any]:
    """The result of an operation; of a pass over data, its metrics."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] != PROTOBUF["Content-Type"]:
        return answer.json()
    return {"metrics": dict(pb.ForwardBackwardOutput.FromString(answer.content).metrics)}


def pass_over(
    run: str, seq: int, *, num_tokens: int = 3, num_data: int = 1, token: int = 1, is_forward: bool = False
) -> bytes:
    """A forward_backward, or a forward, whose data have the tokens 0, 1, 2, … up to 199."""
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy", forward_only=is_forward)
    for _ in range(num_data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = (np.arange(num_tokens, dtype="<i4") % 200).tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.full(num_tokens, token, "<i8").tobytes(), pb.DTYPE_INT64
    return message.SerializeToString()
