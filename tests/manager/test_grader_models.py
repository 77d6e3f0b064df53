"""Graders that are models, as the API takes them: which model is meant, and whose it may be."""

from typing import Any

import openai
import pytest

from common.cancellation import running
from common.settings import TINY
from common.wire.messages import AdapterRef, GradeRequest, GradeResult, Usage
from manager_service.records.job_records import Status, asked_versions
from tests.support.api_server import ApiServer, create, method, played_grader, spec_of, write_state

ASKED = [{"role": "user", "content": "{{item.answer}} or {{sample.output_text}}?"}]


SETTINGS = {"base_models": f"tiny={TINY},other={TINY}"}


def score(model: str, **more: Any) -> dict[str, Any]:
    return {"type": "score_model", "name": "s", "model": model, "input": ASKED, **more}


async def begin(client: openai.AsyncOpenAI, **reinforcement: Any) -> str:
    how = {"type": "reinforcement", "reinforcement": reinforcement} if reinforcement else method()
    return (await create(client, method=how)).id


async def tuned(server: ApiServer, status: Status = "running", **reinforcement: Any) -> str:
    """The name of a model at version 3."""
    job = await begin(server.openai, **reinforcement)
    await write_state(server, job, status=status, version=3)
    return f"ft:tiny:default::{job}"


async def grader_of(server: ApiServer, job: str) -> Any:
    """The one that env workers are told of."""
    return (await spec_of(server, job)).env.args["grader"]


async def test_a_job_keeps_to_the_version_of_a_graders_model_that_there_was(server: ApiServer) -> None:
    model = await tuned(server)
    found = await grader_of(server, await begin(server.openai, grader=score(model)))
    assert found == score(f"{model}@3")
    graders = {"a": score("tiny"), "b": score(f"{model}@1"), "c": score("gpt-x", url="https://api.example.org/v1")}
    multi = {"type": "multi", "graders": graders, "calculate_output": "a + b + c"}
    found = await grader_of(server, await begin(server.openai, grader=multi))
    assert [part["model"] for part in found["graders"].values()] == ["tiny", f"{model}@1", "gpt-x"]
    environment = {"name": "calculator", "args": {"grader": score(model)}}
    assert (await grader_of(server, await begin(server.openai, environment=environment)))["model"] == f"{model}@3"


async def test_a_graders_version_stays_while_it_is_asked(server: ApiServer) -> None:
    model = await tuned(server, "succeeded")
    await server.bus.client.hset(server.bus.cell.versions(model.split(":")[4]), mapping={"2": "0", "3": "1"})
    job = await begin(server.openai, grader=score(f"{model}@2"))
    graded = AdapterRef("default", model.split(":")[4], 2)
    assert await server.bus.client.exists(server.bus.cell.use(graded.job, 2)), "until the owner has read the request"
    assert asked_versions(await spec_of(server, job)) == [graded]
    with pytest.raises(openai.ConflictError, match=f"graders of the job {job} ask this model"):
        await server.openai.models.delete(model)
    await write_state(server, job, status="cancelled")
    assert (await server.openai.models.delete(model)).deleted


async def test_a_model_that_is_not_there_or_not_ones_own_grades_nothing(server: ApiServer) -> None:
    model = await tuned(server)
    where = "method.reinforcement.grader"
    multi = {"type": "multi", "graders": {"a": score("tinny")}, "calculate_output": "a"}
    wrong: list[tuple[Any, str, str]] = [
        (score("tinny"), f"{where}.model", "did you mean 'tiny'"),
        (score("gpt-x"), f"{where}.model", "needs a url"),
        (score(f"{model}@4"), f"{where}.model", "newest version is 3"),
        (score("tinker://x/sampler_weights/1"), f"{where}.model", "a base model or ft:"),
        (score("other"), f"{where}.model", "served by the workers of 'other'"),
        (multi, f"{where}.graders.a.model", "did you mean 'tiny'"),
    ]
    for grader, param, message in wrong:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await begin(server.openai, grader=grader)
        assert refused.value.param == param
    acme = await server.new_tenant("acme")
    environment = {"name": "calculator", "args": {"grader": score(model)}}
    given: dict[str, Any]
    for given in ({"grader": score(model)}, {"environment": environment}):
        with pytest.raises(openai.BadRequestError, match="there is no model"):
            await begin(acme, **given)
    graders: Any = acme.fine_tuning.alpha.graders
    for call in (
        graders.validate(grader=score(model)),
        graders.run(grader=score(model), model_sample="x", item={"answer": "1"}),
    ):
        with pytest.raises(openai.BadRequestError, match="there is no model"):
            await call


async def test_trying_a_models_grader_charges_its_tokens(server: ApiServer) -> None:
    seen: list[GradeRequest] = []

    def reward(request: GradeRequest) -> GradeResult:
        seen.append(request)
        usage = Usage(prompt_tokens=30, sampled_tokens=4, grader_tokens=5)
        return GradeResult(**request.about(), id=request.id, reward=0.5, seconds=1.0, usage=usage)

    model, graders = await tuned(server), server.openai.fine_tuning.alpha.graders
    given: Any = score(model)
    assert (await graders.validate(grader=given)).to_dict()["grader"] == given
    async with played_grader(server.bus, reward):
        result = await graders.run(grader=given, model_sample="x", item={"answer": "1"})
    assert (result.reward, result.metadata.token_usage, result.metadata.sampled_model_name) == (0.5, 39, f"{model}@3")
    assert seen[0].env.args["grader"]["model"] == f"{model}@3"
    used = (await server.http.get("/v1/usage")).json()["total"]
    assert (used["prompt_tokens"], used["sampled_tokens"], used["grader_tokens"], used["env_s"]) == (30, 4, 5, 1.0)
    elsewhere: Any = score("other")
    other = server.api.bases["other"]
    async with running(other.run()), played_grader(other.bus, reward):
        result = await graders.run(grader=elsewhere, model_sample="x", item={"answer": "1"})
    assert result.metadata.sampled_model_name == "other", "as at OpenAI, the grader alone says which model"
