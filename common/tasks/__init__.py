"""Tasks as data: the environments and graders that a job names, checked here, run by the env service.

Its files:

    advantages.py    compares an answer with the others of its group: a row a loss
    environments.py  declares environments as data, and checks them
    formula.py       computes arithmetic without `eval`
    graders.py       declares graders as data, and checks them
    skills.py        makes questions with one right answer each
    templates.py     fills `{{item.x}}` and `{{sample.output_text}}`
"""
