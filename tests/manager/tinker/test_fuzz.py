"""No request to any route of the Tinker protocol finds a server error: valid ones, one value of which is replaced, and bytes at random."""

import asyncio
import json
from itertools import count
from pathlib import Path
from string import Formatter
from typing import Any
from urllib.parse import quote

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manager_service.http.app import ROUTERS
from manager_service.http.tinker import retrieval
from manager_service.http.tinker.parts import PREFIX
from manager_service.records.run_records import run_of
from tests.support.api_server import ApiServer, running_api
from tests.support.nasty_values import nasty, paths, replaced
from tests.support.standin_runs import standing_in
from tests.support.tinker_client import PROTOBUF, client_of, pass_over

MAX_EXAMPLES = 6
METHODS = ("GET", "POST", "PUT", "DELETE")
EVERY: Any = list(HealthCheck)


def bodies(session: str, run: str, saved: str, number: int) -> dict[str, dict[str, Any]]:
    """A valid body of each route that takes one. `number`: the run's."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}
    how = {"max_tokens": 4, "seed": 3, "stop": ["a"], "top_k": 5, "top_p": 0.5, "temperature": 0.5}
    tensor = {"data": [1.0, 2.0], "dtype": "float32", "shape": [2]}
    datum = {
        "model_input": prompt,
        "loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64"}, "weights": tensor},
    }
    passed = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {"a": 1.0}}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 1.0}
    lora = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
    create = {
        "session_id": session,
        "model_seq_id": 100 + number,
        "base_model": "tiny",
        "lora_config": lora,
        "user_metadata": {"a": "b"},
    }
    known = {"model_id": run, "seq_id": 1}
    sampler = f"{session}:sample:1"  # that `create_sampling_session` makes, which comes before
    search = {
        "session_id": session,
        "display_name": "a b",
        "user_metadata": {"a": "b"},
        "owner": {"type": "user", "owner_urns": ["default"]},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}, {"type": "active"}],
        "limit": 5,
        "cursor": {"last_created_at": "2999-01-01T00:00:00Z", "last_session_id": "ses-0"},
    }
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "client/dynamic_config": {"sdk_version": "0.38.0"},
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": session},
        "telemetry": {"events": [{"event": "x"}], "session_id": session, "platform": "x", "sdk_version": "y"},
        "create_model": create,
        "load_weights": {"session_id": session, "model_seq_id": 100 + number, "path": saved, "optimizer": True},
        "get_info": {"model_id": run},
        "forward_backward": known | {"forward_backward_input": passed},
        "forward": known | {"forward_input": passed},
        "optim_step": known | {"adam_params": adam},
        "save_weights": known | {"path": "a", "ttl_seconds": 3600},
        "save_weights_for_sampler": known | {"path": "b", "sampling_session_seq_id": 4},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"},
        "asample": {"prompt": prompt, "sampling_params": how, "num_samples": 2, "base_model": "tiny", "prompt_logprobs": True},
        "retrieve_future": {"request_id": f"{run_of(run)}:0"},
        "cancel_future": {"request_id": f"{run_of(run)}:0"},
        "weights_info": {"tinker_path": saved},
        "save_weights_external": known | {"path": "c", "ttl_seconds": 3600},
        "join_sampling_session": {"sampling_session_id": sampler},
        "sessions/search": search,
    }  # fmt: skip


@pytest.mark.slow
async def test_no_request_finds_a_server_error(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"inference_timeout_s": 0.02, "inference_silence_s": 0.02}
    async with running_api(redis_url, tmp_path / "data", **limits) as server, standing_in(server.bus):
        client = await client_of(server)
        session = await client.session()
        first = await client.run(session, 99)
        await client.post("save_weights", model_id=first, seq_id=1, path="a")
        assert (await client.retrieve(f"{run_of(first)}:1")).status_code == 200
        monkeypatch.setattr(retrieval, "WAIT_S", 0.02)
        for number, path in enumerate(routes("POST")):
            run = await client.run(session, number)
            await asyncio.to_thread(
                mutate, server, path, bodies(session, run, f"tinker://{first}/weights/a", number).get(path, {})
            )
        run = await client.run(session, 98)
        await asyncio.to_thread(scramble, server, pass_over(run, 3, num_tokens=20, num_data=2))
        await asyncio.to_thread(look_at, server, [session, run, "tiny"])


def routes(method: str) -> list[str]:
    """Paths of the protocol's routes, behind its prefix."""
    found: list[Any] = [route for noun in ROUTERS for route in noun.router.routes]
    mine = [route.path for route in found if route.path.startswith(PREFIX) and method in route.methods]
    return sorted(path.removeprefix(f"{PREFIX}/") for path in mine)


def check(answer: requests.Response, told: object) -> None:
    assert answer.status_code < 500, f"{told}: {answer.status_code} {answer.text}"
    if answer.status_code in (400, 404, 410, 429):
        assert answer.json()["error"]["message"], told


def explored(test: Any) -> Any:
    return settings(
        max_examples=MAX_EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=EVERY
    )(test)


def mutate(server: ApiServer, path: str, valid: dict[str, Any]) -> None:
    url = f"{server.url}{PREFIX}/{path.format(**dict.fromkeys(NAMES_IN_PATHS, 'ses-0123456789abcdef'))}"

    numbers = count(2)

    @explored
    @given(place=st.sampled_from(paths(valid)), new=nasty)
    def mutated(place: tuple[Any, ...], new: Any) -> None:
        renumbered = valid | {"seq_id": next(numbers)} if "seq_id" in valid else valid  # one number is taken once
        content = json.dumps(replaced(renumbered, place, new))
        check(http.post(url, data=content, headers=headers(server), timeout=60), f"{path} {content[:300]}")

    with requests.Session() as http:
        whole = http.post(url, json=valid, headers=headers(server), timeout=60)
        assert whole.status_code in (200, 408) or not valid, f"{path}: {whole.text}"
        mutated()


def scramble(server: ApiServer, body: bytes) -> None:
    """A pass in protobuf, some bytes of which are others."""
    url = f"{server.url}{PREFIX}/forward_backward"

    @explored
    @given(
        st.lists(st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(body))
    )
    def scrambled(changes: list[tuple[int, int]], length: int) -> None:
        changed = bytearray(body)
        for place, value in changes:
            changed[place] = value
        sent = bytes(changed[:length] if length % 3 == 0 else changed)
        check(http.post(url, data=sent, headers=headers(server) | PROTOBUF, timeout=60), sent)

    with requests.Session() as http:
        scrambled()


def look_at(server: ApiServer, known: list[str]) -> None:
    """Every route without a body, with names and queries of all kinds."""
    text = st.sampled_from(
        [*known, "", "0", "-1", "9" * 30, "nan", "\0", "*", "../..", "tinker://a/b/c", "a:b:c", "%00"]
    )

    @explored
    @given(st.sampled_from(LOOKS), text, text, text)
    def looked(route: tuple[str, str], name: str, limit: str, offset: str) -> None:
        method, path = route
        filled = path.format(**dict.fromkeys(NAMES_IN_PATHS, quote(name, safe="")))
        query = {"limit": limit, "offset": offset, "access_scope": name}
        told: dict[str, Any] = {"params": query, "headers": headers(server), "timeout": 20, "allow_redirects": False}
        answer = http.request(method, f"{server.url}{PREFIX}/{filled}", **told)
        check(answer, (method, filled, query))

    with requests.Session() as http:
        looked()


def headers(server: ApiServer) -> dict[str, str]:
    return {"X-API-Key": f"tml-{server.key}"}


NAMES_IN_PATHS = sorted(
    {name for method in METHODS for path in routes(method) for _, name, _, _ in Formatter().parse(path) if name}
)
LOOKS = [(method, path) for method in METHODS if method != "POST" for path in routes(method)]
