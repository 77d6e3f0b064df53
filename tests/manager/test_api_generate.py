"""Tokens for tokens, as trainers' clients ask vLLM for them; a played rollout worker answers."""

from tests.support.api_server import ApiServer, Script, played

PATH = "/inference/v1/generate"
PROMPT = [259, *b"add 37+58", 256, 260]


async def test_tokens_are_continued_with_tokens_and_their_log_probs(server: ApiServer) -> None:
    # What verifiers' TrainClient sends
    params = {"temperature": 0.5, "max_tokens": 8, "stop_token_ids": [256], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": params}
    async with played(Script(server.bus)) as script:
        answer = await server.http.post(PATH, json=body, headers={"X-Session-ID": "any"})
    (choice,) = answer.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([57, 53, 256], "stop")
    told = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert told == [("token_id:57", -0.5), ("token_id:53", -0.5), ("token_id:256", -0.5)]
    (request,) = script.seen
    assert request.tokens.numpy().tolist() == PROMPT
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 8)
    assert (await server.http.get("/v1/usage")).json()["total"]["sampled_tokens"] == 3


async def test_what_cannot_be_done_is_refused_by_name(server: ApiServer) -> None:
    for changes, status, says in (
        ({"token_ids": [263, 1 << 40]}, 400, "token ids are between 0 and"),
        *(({"token_ids": wrong}, 400, "token_ids") for wrong in ([], [True], [1.0], ["1"])),
        ({"model": "tinny"}, 404, "tinny"),
        ({"priority": 3}, 400, "leave it out"),
        ({"features": {}}, 400, "features"),
        ({"sampling_params": {"top_kk": 3}}, 400, "top_kk"),
        ({"sampling_params": {"stop_token_ids": [57]}}, 400, "this model stops at 256"),
    ):
        answer = await server.http.post(PATH, json={"model": "tiny", "token_ids": PROMPT, **changes})
        assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text
    answer = await server.http.post(PATH, json={"model": "tiny", "token_ids": PROMPT}, headers={"Authorization": "no"})
    assert answer.status_code == 401
