"""Checks in virtual environments who installs a package for `deploy.install`, uv or pip, and what tests' own environments borrow."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import installed
from tests.support.installed import PACKAGES, ROOT, THIS, environment, made


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has links to this environment's pip and uv: to install both takes seven seconds."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for pattern in (PACKAGES / "pip", PACKAGES / "pip-*", PACKAGES / "uv", PACKAGES / "uv-*", "bin/uv"):
        for path in THIS.glob(str(pattern)):
            (folder / path.relative_to(THIS)).symlink_to(path)
    return folder / "bin" / "python"


def wheel(folder: Path, name: str, *needs: str) -> str:
    path, about = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
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
    first, second, third = (wheel(tmp_path, name) for name in ("first", "second", "third"))
    install(python, "--", first)
    assert installer(python, "first") == "uv"
    assert "pip does" in install(python, "--", second, UV_PYTHON_PREFERENCE="none such"), "uv ends with an error"
    assert installer(python, "second") == "pip"
    install(python, "--", third, PIP_INDEX_URL="https://pypi.org/simple")
    assert installer(python, "third") == "pip"


def test_a_package_that_does_not_exist_ends_it(python: Path) -> None:
    # With an option of pip's, so that pip installs it
    command = [python, "-m", "deploy.install", "--no-index", "--", "nosuch-package-of-marlaas"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "No matching distribution" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_environment_that_borrows_packages_gets_what_is_wanted_and_what_the_lender_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "has_index", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = ["--no-index", f"--find-links={tmp_path}"]
    for name, *needs in [("there",), ("too",), ("away",), ("wanted", "too", "away")]:
        wheel(tmp_path, name, *needs)
    lender = made("lender", [*local, "there", "too"])
    folder = made("borrower", [*local, "wanted", "there"], lender=lender)
    own = {path.name for path in (folder / PACKAGES).glob("*.dist-info")}
    assert own - {"there-1.dist-info"} == {"away-1.dist-info", "wanted-1.dist-info"}, (
        "the lender has `too`, and `there`"
    )
    assert all(installer(folder / "bin" / "python", name) for name in ("there", "too", "away", "wanted"))
