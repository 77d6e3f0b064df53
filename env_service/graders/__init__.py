"""Graders: an item and an answer come in, a reward and its parts go out. A grader that fails raises; it never gives 0.

    runner ─┬─ string_check                            ├─ python ─► the sandbox
            ├─ text_similarity ─► a helper process     ├─ endpoint ─► the user's URL
            ├─ math ─► a helper process                └─ multi: a formula of the others

Its files:

    runner.py     runs a grader of any kind
    text.py       compares two texts
    similarity.py  measures how alike two texts are
    math.py       compares two final answers mathematically, in a helper process
    helper.py     runs in a process of its own what may take forever
    answers/      finds the final answer of a text, and compares two where they are plain
    endpoint.py   asks the user's own URL, and guards the operator's network
"""
