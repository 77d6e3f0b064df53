"""A whole cluster of real processes for a benchmark, driven through its HTTP API like any other."""

import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from manager_service.supervisor import LocalCluster
from tests.live import Api

DEFAULT_JOB: dict[str, Any] = {"batch_size": 16, "group_size": 8}


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[tuple[LocalCluster, Api]]:
    """One rollout, one env and one trainer, as `make up` and `make demo` start them; and the first tenant's API."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(data_dir=Path(folder)) as cluster:
            api = Api(cluster.base_url, cluster.api_key)
            try:
                yield cluster, api
            finally:
                await api.close()
