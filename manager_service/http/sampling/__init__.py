"""Chat and text completions, and tokens for tokens: a prompt comes in, turns are asked of the same workers as training, an answer goes out.

    chat, completions, generate ─► serving ─► inference ─ TurnRequest ─► rollout ─ deltas, result ─► inference ─► serving ─► replies

When no worker has a turn any more, `inference` asks for it again, from the tokens that it has seen.

Its files:

    chat.py                 serves POST /v1/chat/completions
    completions.py          serves POST /v1/completions: text in, text out, no chat template
    generate.py             serves POST /inference/v1/generate: token ids in, token ids with their log-probs out
    serving.py              takes a request of any kind from its body to its answer, or to a stream of chunks
    choices.py              makes one answer's turn request, and says what each message about it means
    cell_share.py           says how many of the cell's slots this replica of the manager may use
    replies.py              makes text, tool calls and log-probs of an answer's tokens
    completion_requests.py  checks the parameters that both share, and makes the request for turns
    feed.py                 reads the streams that many requests wait for over one connection
    inference.py            sends turns to rollout, gives each tenant its share of the slots, gathers deltas and results
    places.py               limits how many requests of a tenant run and wait, and how long they wait
"""
