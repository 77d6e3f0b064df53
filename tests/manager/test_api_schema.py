"""The OpenAPI document is true: property-based requests over all of it find no 500 and no undeclared answer."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from common.store.adapters import PEFT_FILES
from manager_service.records.receivers import Receivers
from tests.support.api_server import GRADER, ApiServer, create, jsonl, method, running_api, upload, write_state
from tests.support.nasty_values import nasty, paths, replaced
from tests.support.rollout_cases import files_of

MAX_EXAMPLES = 2
MAX_MUTATIONS = 12
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
    checks.ignored_auth,
]
ALL_HEALTH_CHECKS: Any = list(HealthCheck)
ADMIN = ("/v1/admin", "/v1/cluster", "/metrics")


@pytest.mark.slow
async def test_no_request_finds_a_server_error_or_an_undeclared_answer(redis_url: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"inference_timeout_s": 0.05, "inference_silence_s": 0.05, "grader_run_timeout_s": 0.05}
    async with running_api(redis_url, tmp_path / "data", command_wait_s=0.0, keep_alive_s=0.1, **limits) as server:
        job = await create(server.openai, training_file=(file := await upload(server.openai)))
        await write_state(server, job.id, status="succeeded", version=2)
        known = {"file_id": file, "job_id": job.id, "tenant_id": "default", "model": f"ft:tiny:default::{job.id}"}
        await asyncio.to_thread(explore, server, known)


def explore(server: ApiServer, known: dict[str, str]) -> None:
    document = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(document)
    found: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in found]
    assert len(operations) > 35
    with requests.Session() as session:
        for operation in operations:
            explore_operation(server, session, operation, known)


def explore_operation(server: ApiServer, session: requests.Session, operation: Any, known: dict[str, str]) -> None:
    key = server.admin_key if operation.path.startswith(ADMIN) else server.key
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=ALL_HEALTH_CHECKS,
    )
    @given(case=cases, real=st.booleans())
    def explored(case: Any, real: bool) -> None:
        if real:
            case.path_parameters = {**(case.path_parameters or {}), **_of(operation, known)}
        headers = {"Authorization": f"Bearer {key}"}
        if real or "Authorization" not in (case.headers or {}):
            case.headers = {**(case.headers or {}), **headers}
        answer = case.call(base_url=server.url, session=session, headers=headers)
        left_out = [not_a_server_error] if answer.status_code == 503 else []
        chosen = [check for check in CHECKS if check not in left_out]
        case.validate_response(answer, checks=chosen, headers=headers, transport_kwargs={"session": session})

    explored()


# Valid bodies, one value of which is replaced -----------------------------------------------------------------------

MULTI = {"type": "multi", "graders": {"a": GRADER}, "calculate_output": "a * 2"}
ENVIRONMENT = {"name": "calculator", "args": {"skill": "calc", "grader": {"type": "math"}}}
FEW = {"batch_size": 2, "n_epochs": 1, "learning_rate": 1e-3}
HYPER = FEW | {"lora_targets": ["q_proj"], "loss": "grpo", "lora_alpha": 2.0}
TUNED = {"hyperparameters": FEW}
EXAMPLES = jsonl(*({"prompt": f"add {i}+1", "completion": str(i + 1)} for i in range(10)))
NOBODY = re.compile("no (rollout|environment) worker answered within")
"""The reason why a right request fails here."""


def bodies(file: str, examples: str, adapter: str) -> dict[str, list[Any]]:
    """Valid bodies by path. `file`, `examples`, `adapter`: of each kind, uploaded."""
    job = {"model": "tiny", "training_file": file, "seed": 1, "metadata": {"a": "b"}, "suffix": "s"}
    methods = [{"grader": MULTI, "hyperparameters": HYPER}, {"environment": ENVIRONMENT, "hyperparameters": HYPER}]
    jobs = [job | {"method": {"type": "reinforcement", "reinforcement": m}} for m in methods]
    wandb = {"project": "p", "name": "n", "entity": "e", "tags": ["t"]}
    integrations = [{"type": "wandb", "wandb": wandb}, {"type": "trackio", "trackio": {"project": "p"}}]
    jobs += [
        jobs[0] | {"integrations": integrations},
        {"model": "tiny", "training_file": file, "adapter_file": adapter, "method": method(n_epochs=1)},
        {"model": "tiny", "training_file": examples, "method": {"type": "supervised", "supervised": TUNED}},
    ]
    sampling = {"n": 1, "temperature": 0.5, "top_p": 0.9, "max_tokens": 2, "stop": ["s"], "seed": 1, "logprobs": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, *said]
    chat = {"model": "tiny", "messages": messages, "tools": [tool], "stop": ["s"], "n": 2, "seed": 1, "max_tokens": 2}
    return {
        "/v1/fine_tuning/jobs": jobs,
        "/v1/fine_tuning/jobs/estimate": jobs,
        "/v1/loggers/wandb": [{"api_key": "k" * 40, "base_url": "https://api.wandb.ai"}],
        "/v1/webhooks": [{"url": "https://hooks.example.org/x", "events": ["fine_tuning.job.succeeded"]}],
        "/inference/v1/generate": [{"model": "tiny", "token_ids": [1, 2], "sampling_params": sampling, "priority": 0}],
        "/v1/chat/completions": [chat, chat | {"stream": True, "logprobs": True, "top_logprobs": 2}],
        "/v1/completions": [
            {"model": "tiny", "prompt": ["a", "b"], "logprobs": 1},
            {"model": "tiny", "prompt": [[1], [2]]},
        ],
        "/v1/fine_tuning/alpha/graders/run": [{"grader": MULTI, "model_sample": "x", "item": {"answer": "3"}}],
    }


@pytest.mark.slow
async def test_a_valid_body_with_one_nasty_value_never_finds_a_server_error(redis_url: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"inference_timeout_s": 0.02, "inference_silence_s": 0.02, "grader_run_timeout_s": 0.02}
    hosts: dict[str, Any] = {"logger_hosts": "api.wandb.ai", "webhook_hosts": "*.example.org"}
    async with running_api(redis_url, tmp_path / "data", **limits, **hosts) as server:
        await Receivers(server.api.redis).tell_installed(["wandb", "trackio"])
        file, examples = await upload(server.openai), await upload(server.openai, EXAMPLES)
        weights, config = (files_of(5)[name] for name in PEFT_FILES)
        form = {"purpose": "adapter", "adapter_config": config.decode()}
        made = await server.http.post("/v1/files", files={"file": ("adapter_model.safetensors", weights)}, data=form)
        for path, valid in bodies(file, examples, made.json()["id"]).items():
            await asyncio.to_thread(mutate, server, path, valid)


def mutate(server: ApiServer, path: str, valid: list[Any]) -> None:
    places = [(body, place) for body in valid for place in paths(body)]

    def answer_to(body: Any) -> tuple[str, requests.Response]:
        content = json.dumps(body)
        answer = session.post(server.url + path, data=content, headers=headers, timeout=60)
        assert answer.status_code != 503 or NOBODY.search(answer.text), f"{content}: {answer.text}"
        return content, answer

    @settings(
        max_examples=MAX_MUTATIONS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=ALL_HEALTH_CHECKS,
    )
    @given(place=st.sampled_from(places), new=nasty)
    def mutated(place: tuple[Any, tuple[Any, ...]], new: Any) -> None:
        content, answer = answer_to(replaced(*place, new))
        assert answer.status_code in (200, 400, 404, 503), f"{content}: {answer.text}"
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["message"] and "Traceback" not in error["message"]

    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    with requests.Session() as session:
        for body in valid:
            content, answer = answer_to(body)
            assert answer.status_code in (200, 503), f"{content}: {answer.text}"
        mutated()


def _of(operation: Any, known: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in known.items() if f"{{{name}}}" in operation.path}
