"""Graders: an item and an answer come in, a reward and its parts go out. A grader that fails raises; it never gives 0.

    runner ─┬─ string_check, text_similarity, math ─┬─ short and plain ─► at once
            │                                       └─ else ─► a helper process, with a time limit
            ├─ python ─► the sandbox
            ├─ endpoint ─► the user's URL
            ├─ score_model, label_model ─┬─ ModelAsked ─► a model of this service, then all once more
            │                            └─ with a url ─► the operator's choice of hosts
            └─ multi: a formula of the others, which share one time limit

Its files:

    runner.py     runs a grader of any kind
    attempt.py    the item and the model's last turn, as graders see them
    text.py       compares two texts at once, or asks a helper process and kills it if it takes too long
    comparing.py  compares two texts; as a program it is the helper
    answers.py    finds the final answer of a text, and compares two where they are plain
    model.py      says what a grader's model is asked, and what its answer means; asks models outside of this service
    judging.py    asks models of this service, by turns of their own
    endpoint.py   asks the user's own URL, and guards the operator's network
"""
