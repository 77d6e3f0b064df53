"""Adapters that users bring: uploaded, checked and started from, through the real HTTP API."""

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.fine_tuning import FineTuningJob
from safetensors.torch import load, save
from typer.testing import CliRunner

from common.store.adapters import PEFT_FILES
from common.wire.messages import LoraSpec
from manager_service.launcher.commands.main import app
from tests.support.api_server import ApiServer, create, method, spec_of, upload
from tests.support.rollout_cases import files_of

WEIGHTS, CONFIG = PEFT_FILES
FILES = files_of(5, rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
TENSORS = load(FILES[WEIGHTS])


async def send(
    server: ApiServer, weights: bytes = FILES[WEIGHTS], name: str = WEIGHTS, config: str | None = None, **changes: Any
) -> httpx.Response:
    """`changes`: of the configuration."""
    written = json.dumps(json.loads(FILES[CONFIG]) | changes) if config is None else config
    form = {"purpose": "adapter", "adapter_config": written}
    return await server.http.post("/v1/files", files={"file": (name, weights)}, data=form)


async def start(server: ApiServer, adapter: str, model: str = "tiny", **hyper: Any) -> FineTuningJob:
    return await create(server.openai, model=model, method=method(**hyper), extra_body={"adapter_file": adapter})


async def test_a_job_starts_from_an_uploaded_adapter(server: ApiServer) -> None:
    file = (await send(server, base_model_digest="t-1")).json()
    assert (file["purpose"], file["num_items"], file["bytes"]) == ("adapter", 0, len(FILES[WEIGHTS]))
    assert (await server.openai.files.content(file["id"])).content == FILES[WEIGHTS]
    job = await start(server, file["id"])
    shown: Any = job.to_dict()
    assert (shown["adapter_file"], shown["model"]) == (file["id"], "tiny")
    assert shown["hyperparameters"]["lora_rank"] == 4
    spec = await spec_of(server, job.id)
    assert spec.hyper.lora == LoraSpec(4, 8.0, ("q_proj", "up_proj")), "the adapter keeps its shape"
    assert spec.adapter_base == "t-1", "its base model is compared where it is trained"
    with pytest.raises(openai.ConflictError, match="needs this file"):
        await server.openai.files.delete(file["id"])
    with pytest.raises(openai.BadRequestError, match="lora_rank: the model that the job starts from has 4"):
        await start(server, file["id"], lora_rank=8)
    listed = [
        [one.id async for one in server.openai.files.list(purpose=purpose)] for purpose in ("adapter", "fine-tune")
    ]
    assert listed[0] == [file["id"]] and len(listed[1]) == 2


def with_tensor(name: str, tensor: torch.Tensor) -> bytes:
    return save(TENSORS | {name: tensor})


def renamed(name: str, to: str) -> bytes:
    return save({to if n == name else n: t for n, t in TENSORS.items()})


A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
NAN, INFINITY = (torch.full_like(TENSORS[A], value) for value in (float("nan"), float("inf")))
HEADER = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "adapter_model.bin"}, "'adapter_model.bin' is a pickle or an archive, which can run code"),
    ({"weights": b"\x80\x02}q\x00."}, "is a pickle or an archive"),
    ({"weights": b"PK\x03\x04" + b"\0" * 100}, "is a pickle or an archive"),
    ({"weights": b""}, "this is no safetensors file"),
    ({"weights": struct.pack("<Q", 1 << 40) + b"{}"}, "its header would have 1099511627776 bytes"),
    ({"weights": struct.pack("<Q", 2 << 20) + b" " * (2 << 20)}, "its header would have 2097152 bytes"),
    ({"weights": struct.pack("<Q", 9000) + b"[" * 9000}, "its header is none"),
    ({"weights": struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 3}, "'x' is not where|its header describes"),
    ({"weights": FILES[WEIGHTS] + b"\0"}, "and its header describes"),
    ({"weights": with_tensor(A, NAN)}, "NaN or infinity"),
    ({"weights": with_tensor(A, INFINITY)}, "NaN or infinity"),
    ({"weights": with_tensor(A, NAN.bfloat16())}, "one dtype"),
    ({"weights": save({n: t.int() for n, t in TENSORS.items()})}, "one dtype of F32, BF16, F16"),
    ({"weights": save({n: t * NAN[0, 0].bfloat16() for n, t in TENSORS.items()})}, "NaN or infinity"),
    ({"weights": with_tensor("base_model.model.lm_head.weight", torch.zeros(2))}, "is no factor of a layer's adapter"),
    ({"weights": with_tensor(A, torch.zeros(8, 128))}, r"has the shape \[8, 128\]: r is 4"),
    ({"weights": with_tensor(A, torch.zeros(4, 64))}, "layers must be alike"),
    ({"weights": save({n: t for n, t in TENSORS.items() if n != A})}, "every layer from 0 on must have"),
    ({"weights": renamed(A, A.replace(".0.", ".٠."))}, "is no factor of a layer's adapter"),
    ({"weights": renamed(A, A.replace(".0.", ".000."))}, "is no factor of a layer's adapter"),
    ({"r": 8}, "r is 8"),
    ({"r": 0}, "r 0 or lora_alpha 8.0 is out of range"),
    ({"lora_alpha": "x"}, "lora_alpha 'x' is out of range"),
    ({"use_dora": True}, "use_dora True is not offered"),
    ({"use_qalora": True}, "use_qalora True is not offered"),
    ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens \[1\] is not offered"),
    ({"layer_replication": [[0, 4], [2, 4]]}, "layer_replication .* is not offered"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16' is not offered"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save .* is not offered"),
    ({"layers_to_transform": [0]}, r"layers_to_transform \[0\] is not offered"),
    ({"base_model_digest": 1}, "base_model_digest 1 is no digest"),
    ({"use_what_comes_next": True}, "use_what_comes_next True is not offered"),
    ({"weights": struct.pack("<Q", 2) + b"[]"}, "its header is none: TypeError it is no JSON object"),
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not offered"),
    ({"config": "{"}, "adapter_config: not JSON"),
    ({"config": "[]"}, "adapter_config: must be a JSON object"),
    ({"config": '{"r": NaN}'}, "NaN is not a JSON number"),
]  # fmt: skip


async def test_what_is_no_adapter_is_refused_by_name(server: ApiServer) -> None:
    for changes, complaint in BAD:
        answer = await send(server, **changes)
        assert answer.status_code == 400, complaint
        assert re.search(complaint, answer.json()["error"]["message"]), answer.text


async def test_no_bytes_of_an_adapter_are_an_error_of_the_service(server: ApiServer) -> None:
    chance, whole = random.Random(0), FILES[WEIGHTS]
    length = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(40):
        weights, config = bytearray(whole), bytearray(FILES[CONFIG])
        for _ in range(chance.choice([1, 3])):
            weights[chance.randrange(length)] = chance.choice(b'0912345",:[]{}-.e \xff\0')
        if chance.random() < 0.5:
            weights, config[chance.randrange(len(config))] = bytearray(whole), chance.choice(b'09",:[]{}-\\ ')
        answer = await send(server, bytes(weights), config=config.decode())
        assert answer.status_code in (200, 400), (weights[:length], config)


async def test_an_adapter_of_half_precision_is_welcome(server: ApiServer) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert (await send(server, save({n: t.to(dtype) for n, t in TENSORS.items()}))).status_code == 200


async def test_what_does_not_fit_or_is_anothers_is_refused(server: ApiServer) -> None:
    file = (await send(server)).json()["id"]
    wide = save(
        {n: torch.zeros(t.shape[0], 64) if n.endswith("up_proj.lora_A.weight") else t for n, t in TENSORS.items()}
    )
    deep = save({n: t for n, t in TENSORS.items() if ".layers.3." not in n})
    other = save({n.replace("up_proj", "fc1"): t for n, t in TENSORS.items()})
    moved = save({n.replace("mlp.up_proj", "evil.x.up_proj"): t for n, t in TENSORS.items()})
    for weights, complaint in (
        (wide, "its mlp.up_proj is 384 x 64, the base's 384 x 128"),
        (deep, "it is for 3 layers, and the base has 4"),
        (other, "its mlp.fc1 is 384 x 128, the base's not there"),
        (moved, "its evil.x.up_proj is 384 x 128, the base's not there"),
    ):
        with pytest.raises(openai.BadRequestError, match=complaint) as refused:
            await start(server, (await send(server, weights)).json()["id"])
        assert refused.value.param == "adapter_file"
    with pytest.raises(openai.BadRequestError, match="is an adapter: name it as adapter_file"):
        await create(server.openai, training_file=file)
    with pytest.raises(openai.BadRequestError, match="holds items"):
        await start(server, await upload(server.openai))
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        await start(server, "file-x")
    with pytest.raises(openai.BadRequestError, match="is a start already"):
        await start(server, file, model="ft:tiny:default::ftjob-1")
    answer = await server.http.post("/v1/files", files={"file": (WEIGHTS, FILES[WEIGHTS])}, data={"purpose": "adapter"})
    assert "send the text of adapter_config.json too" in answer.json()["error"]["message"]
    acme = await server.new_tenant("acme")
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        await create(acme, extra_body={"adapter_file": file})


def test_submit_uploads_the_folder_of_an_adapter(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ("submit", "--adapter", str(tmp_path), "--environment", "calculator"), env={"MARLAAS_API_KEY": "x"}
    )
    assert "a folder as PEFT's save_pretrained writes it is needed" in str(result.exception)
