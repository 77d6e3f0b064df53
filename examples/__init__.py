"""Programs to read and to run.

Its files:

    quickstart.py           the shortest use of the API
    first_hour.ipynb        a notebook over `marlaas_client`
    demo.py                 six jobs of three tenants, shown live: `make demo`
    report.py               draws the demo's report.png
    new_skill.py            teaches a skill by examples, then by rewards
    three_turns.py          learns to answer a simulated user
    simulated_user.py       that environment, a file to copy
    openenv_job.py          learns from an OpenEnv server
    largest_env/            that server
    verifiers_addition.py   learns from a package for `verifiers`
    packages/               that package
    pretrained.py           two tenants teach a pretrained model a skill each, with a curve
    gsm8k.py                learns grade-school maths, on a real base model
    tinker_loop.py          a training loop of one's own, through the `tinker` SDK
    tinker_demo.py          runs it, or a recipe of tinker-cookbook: `make tinker`
    tinker.txt              what that needs beside the service
"""
