"""The unmodified `tinker` SDK, in a process of its own, against the real HTTP server and a stand-in for the owner."""

import msgspec
import pytest

from common.wire.operations import LoadWeights
from manager_service.http.stores import operation_store
from manager_service.http.tinker import session_routes
from tests.support.api_server import ApiServer, Script, played
from tests.support.standin_runs import StandInRuns
from tests.support.tinker_sdk import run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the first one installs the SDK


async def test_chunks_of_one_pass_come_in_any_order_and_their_results_in_one(
    server: ApiServer, owner: StandInRuns
) -> None:
    told = await run_program(
        server,
        """
client = service.create_lora_training_client("tiny").result()
data = [datum(200, start=i) for i in range(600)]
result = client.forward_backward(data, "cross_entropy").result()
step = client.optim_step(types.AdamParams()).result()
print(json.dumps({"num": len(result.loss_fn_outputs), "loss": result.metrics, "step": step.metrics}))
""",
    )
    assert (told["num"], told["loss"]) == (600, {"loss:sum": 120_000.0})
    chunks = [operation.seq for operation in owner.seen if operation.action == "forward_backward"]
    assert chunks == list(range(1, len(chunks) + 1)) and len(chunks) > 3


async def test_what_is_wrong_is_shown_where_the_sdk_shows_it(server: ApiServer, owner: StandInRuns) -> None:
    told = await run_program(
        server,
        """
client = service.create_lora_training_client("tiny").result()
wrong = {
    "loss": told(client.forward_backward([datum(3)], "stable_reinforce", {"kl_coef": 0.1})),
    "inputs": told(client.forward_backward([datum(3)], "ppo")),
    "token": told(client.forward_backward([types.Datum(model_input=types.ModelInput.from_ints([99999]),
        loss_fn_inputs={"target_tokens": [1]})], "cross_entropy")),
    "step": told(client.optim_step(types.AdamParams(learning_rate=-1.0))),
    "name": told(client.save_state("a/b")),
    "after": told(client.forward_backward([datum(3)], "cross_entropy")),
    "base": told(service.create_lora_training_client("tinyy")),
    "rank": told(service.create_lora_training_client("tiny", rank=1000)),
}
print(json.dumps(wrong))
""",
    )
    assert "RequestFailedError" in told["loss"] and "did you mean 'kl_coeff'?" in told["loss"]
    assert "lacks 'logprobs'" in told["inputs"]
    assert "there is no token 99999" in told["token"]
    assert "learning_rate cannot be -1" in told["step"]
    assert "'a/b' cannot be a checkpoint's name" in told["name"]
    assert "loss:sum" in told["after"]
    assert "BadRequestError" in told["base"] and "did you mean 'tiny'?" in told["base"]
    assert "this service takes 1 to 512" in told["rank"]


async def test_a_run_begins_with_another_runs_checkpoint(server: ApiServer, owner: StandInRuns) -> None:
    told = await run_program(
        server,
        """
client = service.create_lora_training_client("tiny", rank=4).result()
client.optim_step(types.AdamParams()).result()
path = client.save_state("first").result().path
second = service.create_training_client_from_state_with_optimizer(path).result()
print(json.dumps({"path": path, "second": second.model_id, "rank": second.get_info().lora_rank,
    "none": told(service.create_training_client_from_state(path + "x"))}))
""",
    )
    first, second = owner.created
    assert second.source is not None and (second.source.job, second.source.version) == (first.id, 1)
    assert (second.with_optimizer, second.lora, told["second"]) == (True, first.lora, second.public_id)
    assert "there is no checkpoint" in told["none"]


async def test_weights_are_loaded_into_a_run_or_the_future_says_why_not(server: ApiServer, owner: StandInRuns) -> None:
    told = await run_program(
        server,
        """
def made(**options):
    client = service.create_lora_training_client("tiny", **options)
    return client.result() if hasattr(client, "result") else client
def stepped(client):
    return client.optim_step(types.AdamParams()).result().metrics["version"]
first, client, other = made(rank=4, train_attn=False), made(rank=4, train_attn=False), made(rank=8)
stepped(first)
path = first.save_state("one").result().path
sampled = first.save_weights_for_sampler("two").result().path
gradient = client.forward_backward([datum(3)], "cross_entropy")
loads = [client.load_state(path), client.load_state_with_optimizer(path)]
step = stepped(client)
print(json.dumps({"path": path, "loaded": [load.result().path for load in loads], "shape": told(other.load_state(path)),
    "missing": told(client.load_state(path + "x")), "bare": told(client.load_state_with_optimizer(sampled)),
    "versions": [step, stepped(client), stepped(other)]}))
""",
    )
    assert told["loaded"] == [told["path"]] * 2 and told["versions"] == [3, 4, 1]
    assert "rank 4" in told["shape"] and "rank 8" in told["shape"] and "create a run from it" in told["shape"]
    assert "there is no checkpoint" in told["missing"] and "no optimiser state" in told["bare"]
    loads = [operation for operation in owner.seen if operation.action == "load" and operation.failure is None]
    sources = [msgspec.msgpack.decode(load.payload, type=LoadWeights) for load in loads]
    assert [(load.source.version, load.with_optimizer) for load in sources] == [(1, False), (1, True)]


@pytest.mark.parametrize("version", ["0.38.0", "0.24.1"])
async def test_one_call_may_have_more_data_than_may_be_open_at_once(
    server: ApiServer, owner: StandInRuns, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Its first part comes first: a client that sent that one last would wait for it in vain."""
    monkeypatch.setattr(operation_store, "MAX_OPEN", 3)
    monkeypatch.setitem(session_routes.CLIENT_CONFIG, "fwdbwd_max_chunk_len", 1)
    told = await run_program(
        server,
        """
from tinker.lib.public_interfaces import training_client
training_client.MAX_CHUNK_LEN = 1  # 0.24 does not ask the service
client = service.create_lora_training_client("tiny")
client = client.result() if hasattr(client, "result") else client
fb, step = client.forward_backward([datum(3 + n) for n in range(12)], "cross_entropy"), client.optim_step(types.AdamParams())
print(json.dumps([fb.result().metrics["loss:sum"], step.result().metrics["version"]]))
""",
        version=version,
    )
    assert told == [sum(range(3, 15)), 1.0]
    assert [operation.seq for operation in owner.seen] == list(range(1, 14))


async def test_samplers_sample_with_the_version_that_they_name(server: ApiServer, owner: StandInRuns) -> None:
    script = Script(server.bus, text="ok", inbox=server.bus.cell.rollout)
    async with played(script):
        told = await run_program(
            server,
            """
client = service.create_lora_training_client("tiny").result()
client.optim_step(types.AdamParams()).result()
params = types.SamplingParams(max_tokens=8, temperature=0.5, seed=3)
prompt = types.ModelInput.from_ints([104, 105])
def sample(sampler, n=1):
    result = sampler.sample(prompt, num_samples=n, sampling_params=params).result()
    return [[s.tokens, s.logprobs, s.stop_reason, s.sequence_id] for s in result.sequences]
saved = sample(client.save_weights_and_get_sampling_client(), 2)
base = sample(service.create_sampling_client(base_model="tiny"))
path = client.save_weights_for_sampler("one").result().path
named = sample(service.create_sampling_client(model_path=path))
print(json.dumps({"saved": saved, "base": base, "named": named}))
""",
        )
    tokens = [*b"ok", 256]
    for sampler, num in (("saved", 2), ("base", 1), ("named", 1)):
        assert [row[:3] for row in told[sampler]] == [[tokens, [-0.5] * 3, "stop"]] * num
    assert [row[3].rpartition("@")[2] for row in (*told["saved"], *told["base"], *told["named"])] == [
        "1",
        "1",
        "0",
        "1",
    ]
    adapters = [str(request.adapter) for request in script.seen]
    assert adapters == [f"{owner.created[0].id}@1"] * 2 + ["base", f"{owner.created[0].id}@1"]
    assert {request.trajectory.sample for request in script.seen} == {0, 1}
    assert {request.trajectory.seed for request in script.seen} == {3}


async def test_clients_of_one_sampler_number_their_requests_apart(server: ApiServer) -> None:
    async with played(script := Script(server.bus, text="ok", inbox=server.bus.cell.rollout)):
        told = await run_program(
            server,
            """
import pickle
first = service.create_sampling_client(base_model="tiny")
other = pickle.loads(pickle.dumps(first))
prompt, params = types.ModelInput.from_ints([104, 105]), types.SamplingParams(max_tokens=8)
futures = [client.sample(prompt, num_samples=1, sampling_params=params) for client in (first, other) for _ in range(5)]
print(json.dumps([list(future.result().sequences[0].tokens) for future in futures]))
""",
        )
    assert told == [[*b"ok", 256]] * 10
    assert len({request.id for request in script.seen}) == 10
    assert len(await server.bus.client.keys(server.bus.cell.clients("*"))) == 1


async def test_runs_and_checkpoints_are_listed(server: ApiServer, owner: StandInRuns) -> None:
    told = await run_program(
        server,
        """
client = service.create_lora_training_client("tiny", rank=4, train_attn=False, user_metadata={"a": "b"}).result()
second = service.create_lora_training_client("tiny").result()
path = client.save_state("first").result().path
client.save_weights_for_sampler("second").result()
rest = service.create_rest_client()
runs = rest.list_training_runs().result()
info = rest.get_weights_info_by_tinker_path(path).result()
session = rest.get_session(client.model_id.partition(":train:")[0]).result()
print(json.dumps({
    "runs": [run.training_run_id for run in runs.training_runs], "num": runs.cursor.total_count,
    "first": rest.get_training_run(client.model_id).result().last_checkpoint.tinker_path, "path": path,
    "metadata": rest.get_training_run(client.model_id).result().user_metadata,
    "checkpoints": [row.checkpoint_id for row in rest.list_checkpoints(client.model_id).result().checkpoints],
    "all": [row.checkpoint_type for row in rest.list_user_checkpoints().result().checkpoints],
    "info": [info.lora_rank, info.train_mlp, info.train_attn, info.train_unembed],
    "session": session.training_run_ids, "sessions": rest.list_sessions().result().sessions,
    "mine": [second.model_id, client.model_id]}))
""",
    )
    assert told["runs"] == told["session"] == told["mine"] and told["num"] == 2
    assert told["first"] == told["path"] and told["metadata"] == {"a": "b"}
    assert told["checkpoints"] == ["weights/first", "sampler_weights/second"]
    assert told["all"] == ["training", "sampler"]
    assert told["info"] == [4, True, False, False]
    assert told["sessions"] == [told["mine"][0].partition(":train:")[0]]


async def test_an_older_client_trains_and_samples(server: ApiServer, owner: StandInRuns) -> None:
    """It speaks protobuf because the service tells it to."""
    async with played(Script(server.bus, text="ok", inbox=server.bus.cell.rollout)):
        told = await run_program(
            server,
            """
client = service.create_lora_training_client("tiny", rank=4)
fb, step = client.forward_backward([datum(3), datum(5)], "cross_entropy"), client.optim_step(types.AdamParams())
fb, step = fb.result(), step.result()
forward = client.forward([datum(4)], "cross_entropy").result()
path = client.save_state("first").result().path
sampler = client.save_weights_and_get_sampling_client("second")
result = sampler.sample(types.ModelInput.from_ints([104]), num_samples=2,
    sampling_params=types.SamplingParams(max_tokens=8)).result()
print(json.dumps({"logprobs": [out["logprobs"].tolist() for out in fb.loss_fn_outputs], "loss": fb.metrics,
    "step": step.metrics, "forward": forward.metrics, "path": path,
    "samples": [[list(s.tokens), list(s.logprobs), s.stop_reason] for s in result.sequences],
    "wrong": told(client.forward_backward([datum(3)], "ppo"))}))
""",
            version="0.24.1",
        )
    assert told["logprobs"] == [[-0.5] * 3, [-0.5] * 5] and told["loss"] == {"loss:sum": 8.0}
    assert told["step"]["version"] == 1.0 and told["forward"] == {"loss:sum": 4.0}
    assert told["path"].endswith("/weights/first") and "lacks 'logprobs'" in told["wrong"]
    assert told["samples"] == [[[*b"ok", 256], [-0.5] * 3, "stop"]] * 2
    actions = [operation.action for operation in owner.seen]
    assert actions[:5] == ["forward_backward", "optim_step", "forward", "save_weights", "save_for_sampler"]
