"""Checks in a virtual environment who installs a package for `deploy.install`: uv or pip."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.installed import ROOT, environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def wheel(folder: Path, name: str) -> str:
    path, about = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return str(path)


def install(python: Path, *words: str, **variables: str) -> str:
    """Runs it; returns what it prints."""
    command = [python, "-m", "deploy.install", *words]
    run = subprocess.run(command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def installer(python: Path, name: str) -> str:
    """Returns who installed a package, as its metadata tells."""
    asked = f"from importlib.metadata import distribution; print(distribution('{name}').read_text('INSTALLER'))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def test_uv_installs_unless_pip_has_settings_that_it_does_not_read(python: Path, tmp_path: Path) -> None:
    first, second, third, fourth = (wheel(tmp_path, name) for name in ("first", "second", "third", "fourth"))
    install(python, "--", first)
    assert installer(python, "first") == "uv"
    assert "pip does" in install(python, "--", second, UV_PYTHON_PREFERENCE="none such"), "uv ends with an error"
    assert installer(python, "second") == "pip"
    install(python, "--no-cache-dir", "--", third)
    assert installer(python, "third") == "pip"
    install(python, "--", fourth, PIP_INDEX_URL="https://pypi.org/simple")
    assert installer(python, "fourth") == "pip"


def test_a_package_that_does_not_exist_ends_it(python: Path) -> None:
    command = [python, "-m", "deploy.install", "--no-index", "--", "nosuch-package-of-marlaas"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "No matching distribution" in ended.stderr
    assert "Traceback" not in ended.stderr
