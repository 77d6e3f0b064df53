"""Chat and text completions: a prompt comes in, turns are asked of the same workers as training, an answer goes out.

    chat, completions ─► requests ─► shares ─ TurnRequest ─► rollout ─ deltas, result ─► shares ─► replies ─► chat, completions

When a worker dies, `shares` asks for the turn again, from the tokens that were already seen.

    chat.py          serves POST /v1/chat/completions
    completions.py   serves POST /v1/completions: text in, text out, no chat template
    requests.py      checks the parameters that both share, and watches over a request until it is answered
    shares.py        sends turns to rollout, gives each tenant its share of the slots, gathers deltas and results
    replies.py       makes text, tool calls and log-probs of an answer's tokens
"""
