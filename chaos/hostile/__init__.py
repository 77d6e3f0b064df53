"""A tenant that means harm: what it submits, what it sends, and what it leaves half done.

Its files:

    jobs.py        its jobs, each with one planned end, and the acts beside them
    acts.py        floods, slow readers, strange names, large uploads, deserted runs
    graders.py     what it has graders do
    deserter.py    a client of the Tinker protocol that never ends anything
"""
