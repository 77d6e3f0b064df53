"""`cluster.json` in the data folder of a running cluster."""

import contextlib
from pathlib import Path

import msgspec

CLUSTER_FILE = "cluster.json"


class ClusterFile(msgspec.Struct, frozen=True):
    """Tells the CLI, and more workers, where the cluster is. Mode 0600, because `redis_url` has a password."""

    url: str
    pid: int  # of the supervisor
    redis_url: str


def read_cluster_file(data_dir: Path) -> ClusterFile | None:
    """None if no cluster runs on this folder, or it is just starting."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode((data_dir / CLUSTER_FILE).read_bytes(), type=ClusterFile)
    return None
