"""The exporter with stand-ins for the loggers: `python -m tests.support.standin_exporter`."""

import sys

from common.worker.service import run_with
from manager_service.export.__main__ import main
from manager_service.export.passes import Passes
from manager_service.settings import ManagerSettings

WRITER = (sys.executable, "-m", "tests.support.standin_logger")

if __name__ == "__main__":
    run_with("exporter", ManagerSettings, lambda settings: main(settings, Passes(WRITER), ["trackio", "wandb"]))
