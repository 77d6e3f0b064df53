"""A worker of MARLAAS_TEST_SERVICE whose base model is not loaded before the file MARLAAS_TEST_GO_ON is there."""

import importlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from common.worker.service import run
from rollout_service.settings import RolloutSettings
from trainer_service.settings import TrainerSettings

LOADERS = {"rollout": "load_engine", "trainer": "load_trainer"}


def main(service: str, file: Path) -> None:
    module: Any = importlib.import_module(f"{service}_service.__main__")
    load = getattr(module, LOADERS[service])

    def waiting(settings: Any) -> Any:
        helper = subprocess.Popen(["sleep", "600"])  # as an engine's process, or a self-test's
        file.with_name("helper").write_text(str(helper.pid))
        while not file.exists():
            time.sleep(0.05)  # as a thread that reads weights, which nothing ends
        helper.kill()
        return load(settings)

    setattr(module, LOADERS[service], waiting)
    if service == "rollout":
        run(service, RolloutSettings, module.build, module.pooled, module.early)
    run(service, TrainerSettings, module.build, module.pooled)


if __name__ == "__main__":
    main(os.environ["MARLAAS_TEST_SERVICE"], Path(os.environ["MARLAAS_TEST_GO_ON"]))
