"""Graders: an item and an answer come in, a reward and its parts go out. A grader that fails raises; it never gives 0.

    runner ─┬─ text (string_check, text_similarity)      ├─ python ─► the sandbox
            ├─ math ─► a helper process                  ├─ endpoint ─► the user's URL
            └─ multi: a formula of the others

Its files:

    runner.py     runs a grader of any kind
    text.py       compares two texts
    math.py       compares two final answers mathematically, in a helper process
    endpoint.py   asks the user's own URL, and guards the operator's network
"""
