"""Compiles `tinker.proto` to `tinker_pb2.py` and its types: `python -m deploy.compile_proto [FOLDER]`.

Needs grpcio-tools, which `.[dev]` installs. What it writes is committed, so that running the service needs no compiler.
"""

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parent.parent / "manager_service" / "http" / "tinker" / "wire" / "tinker.proto"


def compile_into(folder: Path) -> None:
    """Writes `tinker_pb2.py` and `tinker_pb2.pyi`. Raises CalledProcessError if the file does not compile."""
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", *outputs, PROTO.name], check=True)


if __name__ == "__main__":
    compile_into(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO.parent)
