"""Programs to read and to run.

`demo.py` (`make demo`), `quickstart.py`, the shortest use of the API, `first_hour.ipynb`, a notebook over `marlaas_client`,
`new_skill.py`, which teaches by examples and then by rewards, `three_turns.py`, which learns to answer a simulated user, that
environment, `simulated_user.py`, `openenv_job.py`, which learns from an OpenEnv server, that server, `largest_env/`,
`verifiers_addition.py`, which learns from a package for `verifiers` (`packages/`), `gsm8k.py`, grade-school maths on a real base
model, and `tinker_loop.py`, a loop of one's own through the `tinker` SDK (`make tinker`).
"""
