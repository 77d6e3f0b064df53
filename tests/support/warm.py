"""Imports all services, in the fork server of `forked.py` alone. It starts no thread and computes nothing: a forked process chooses
its kernels itself."""

import gc
import importlib
import os

from manager_service.local.supervisor import NO_PLUGINS, ONE_THREAD

os.environ.update(ONE_THREAD | NO_PLUGINS)  # read when numpy and torch are imported
for program in ("manager_service", "manager_service.export", "rollout_service", "env_service", "trainer_service"):
    importlib.import_module(f"{program}.__main__")
importlib.import_module("trainer_service.ranks.__main__")  # and with it transformers' models, which take three seconds
gc.freeze()  # a collection in a forked process would copy all of it
