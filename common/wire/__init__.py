"""Messages: what one service says to another, and the bytes that it travels as.

    message ─► codec ─► bytes ─► codec ─► message          a transcript's parts travel once: history

Its files:

    codec.py       makes bytes of messages, and messages of bytes
    history.py     sends a trajectory's parts once: short forms of results and later requests
    messages.py    declares what one service says to another about jobs
    operations.py  declares what one service says to another about runs
    reported.py    declares the parts of a worker's report
    transcript.py  arrays; tokens, with who wrote each and how likely it was
"""
