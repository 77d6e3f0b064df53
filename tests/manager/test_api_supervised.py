"""Supervised jobs through the HTTP API."""

from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from common.tasks.environments import SUPERVISED
from common.wire.messages import AdapterRef
from tests.support.api_server import ApiServer, create, item, jsonl, method, spec_of, upload, write_state

HYPER = "method.supervised.hyperparameters"


def example(question: str = "min 3,1,2", answer: str = "1") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


FORMS = [
    example(),
    {"prompt": "min 3,1,2", "completion": "1"},
    {"prompt": example()["messages"][:1], "completion": example()["messages"][1:]},
]
EXAMPLES = jsonl(*FORMS, *FORMS, *FORMS, *FORMS)


async def learn(server: ApiServer, rows: bytes = EXAMPLES, hyper: Any = None, **changes: Any) -> FineTuningJob:
    how = {"type": "supervised", "supervised": {"hyperparameters": hyper or {}}}
    return await create(server.openai, **{"training_file": await upload(server.openai, rows), "method": how, **changes})


async def test_a_job_of_each_form_of_examples_is_taken_as_openais(server: ApiServer) -> None:
    held_out = await upload(server.openai, jsonl(example(), example()))
    job = await learn(server, hyper={"batch_size": 4, "n_epochs": 2}, validation_file=held_out)
    assert job.method and job.method.type == "supervised" and job.method.supervised
    given: Any = job.to_dict()
    assert given["hyperparameters"] == given["method"]["supervised"]["hyperparameters"]
    assert given["hyperparameters"]["batch_size"] == 4 and "group_size" not in given["hyperparameters"]
    spec = await spec_of(server, job.id)
    assert (spec.hyper.num_steps, spec.hyper.group_size, spec.hyper.loss.name) == (6, 1, "cross_entropy")
    assert (spec.num_items, spec.num_eval_items, spec.env.name) == (12, 2, SUPERVISED)
    assert len(spec.notes) == 1 and "without the chat template" in spec.notes[0]
    assert not (await spec_of(server, (await learn(server, jsonl(example()))).id)).notes


async def test_without_a_method_a_job_is_supervised_with_openais_old_hyperparameters(server: ApiServer) -> None:
    job = await learn(server, method=openai.omit, hyperparameters={"n_epochs": 3, "batch_size": "auto"})
    assert job.method and job.method.type == "supervised" and job.hyperparameters.n_epochs == 3
    with pytest.raises(openai.BadRequestError, match="did you mean 'n_epochs'"):
        await learn(server, method=openai.omit, hyperparameters={"n_epoch": 3})


async def test_what_is_wrong_is_named(server: ApiServer) -> None:
    long = example(answer="1" * 2048)
    refused: list[tuple[Any, str, str]] = [
        ({"hyper": {"group_size": 4}}, f"{HYPER}.group_size", "unknown hyperparameter 'group_size' of a supervised job"),
        ({"hyper": {"n_epoch": 1}}, f"{HYPER}.n_epoch", "did you mean 'n_epochs'?"),
        ({"hyper": {"batch_size": 0}}, f"{HYPER}.batch_size", "greater than or equal to 1"),
        ({"rows": jsonl(example(), item())}, "training_file", "line 2: a supervised job learns answers"),
        ({"rows": jsonl(example(), long, long)}, "training_file", r"2 of the examples .* \(lines 2, 3"),
        ({"method": {"type": "dpo"}}, "method.type", "'dpo' is not offered"),
        ({"method": {"type": "superviced"}}, "method.type", "did you mean 'supervised'?"),
        ({"method": method()}, "training_file", "line 1: the last message is the assistant's"),
        ({"method": {"type": "reinforcement", "reinforcement": {"environment": {"name": SUPERVISED}}}},
         "method.reinforcement.environment.name", "unknown environment"),
    ]  # fmt: skip
    for changes, param, complaint in refused:
        with pytest.raises(openai.BadRequestError, match=complaint) as error:
            await learn(server, **changes)
        assert error.value.param in (param, "environment.name"), error.value.message


async def test_a_job_of_either_kind_goes_on_from_one_of_the_other(server: ApiServer) -> None:
    first = await learn(server, hyper={"lora_rank": 4})
    await write_state(server, first.id, status="succeeded", version=3)
    rewarded = await create(server.openai, model=f"ft:tiny:default::{first.id}")
    await write_state(server, rewarded.id, status="succeeded", version=3)
    again = await learn(server, model=f"ft:tiny:default::{rewarded.id}@2")
    sources = [(await spec_of(server, job.id)).source for job in (rewarded, again)]
    assert sources == [AdapterRef("default", first.id, 3), AdapterRef("default", rewarded.id, 2)]
    assert (await spec_of(server, again.id)).hyper.lora.rank == 4
    with pytest.raises(openai.BadRequestError, match="lora_rank: the model that the job starts from has 4") as refused:
        await learn(server, model=f"ft:tiny:default::{first.id}", hyper={"lora_rank": 8})
    assert refused.value.param == f"{HYPER}.lora_rank"


async def test_the_hyperparameters_of_supervised_jobs_are_listed(server: ApiServer) -> None:
    found = (await server.http.get("/v1/fine_tuning/hyperparameters", params={"method": "supervised"})).json()["data"]
    assert {"batch_size", "n_epochs", "learning_rate_multiplier"} <= {row["id"] for row in found}
    assert not {"group_size", "kl_coef", "temperature"} & {row["id"] for row in found}
