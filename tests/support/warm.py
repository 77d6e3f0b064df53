"""Imports what ranks need, in the fork server of `forked_ranks.py` alone. It starts no thread and computes nothing."""

import gc
import importlib
import os

from manager_service.launcher.supervisor import NO_PLUGINS, ONE_THREAD

os.environ.update(ONE_THREAD | NO_PLUGINS)  # read when numpy and torch are imported

importlib.import_module("trainer_service.ranks.__main__")

gc.freeze()  # a collection in a forked process would copy all of it
