"""Environments: an item comes in, messages for the model go out, and each turn of the model leads to a Step.

    EnvSpec ─► catalogue ─► environment: reset(item) ─► messages; step(state, turn) ─► messages | the end and a reward
                           live: open(item) ─► a session: its messages; step(turn) ─► the same

Its files:

    catalogue.py         finds and makes the environment that a message names, built in or installed
    tool_loop.py         grades one answer, after the tool calls of the turns before it
    tools.py             the tools `calculator`, `python` and `search`
    openenv.py           gives each trajectory a session at an OpenEnv server; actions and observations
    openenv_server.py    finds those servers, and speaks their protocol
    trl_factory.py       runs what TRL's trainer takes as `environment_factory`
    text_collections.py  indexes and searches the operator's texts, and a job's own
"""
