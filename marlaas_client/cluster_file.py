"""`cluster.json` in the data folder of a running cluster."""

import contextlib
from pathlib import Path

from pydantic import BaseModel, ValidationError

CLUSTER_FILE = "cluster.json"


class ClusterFile(BaseModel, frozen=True):
    """Tells clients on this machine, and more workers, where the cluster is. Mode 0600, because `redis_url` has a password."""

    url: str
    pid: int  # of the supervisor
    redis_url: str
    bases: dict[str, str] = {}  # base model -> its folder, if it lies on this machine


def read_cluster_file(data_dir: Path) -> ClusterFile | None:
    """None if no cluster runs on this folder, or it is just starting."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        return ClusterFile.model_validate_json((data_dir / CLUSTER_FILE).read_bytes())
    return None
