"""MARLaaS as a new user has it: wheels built from the tracked files, in virtual environments of their own."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
INSTALL_S = 300.0
EVERYDAY = ("common", "examples", "models", "manager_service", "env_service", "rollout_service", "trainer_service")
"""Names of our packages that a user's folders may have too."""


@dataclass(frozen=True)
class Installed:
    """A virtual environment."""

    folder: Path

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def command(self, program: str) -> str:
        return str(self.folder / "bin" / program)

    def run(self, program: str, *arguments: str, cwd: Path, timeout_s: float = 200) -> str:
        """Standard output of a program that succeeds."""
        command = [self.command(program), *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def environment() -> dict[str, str]:
    """This process's variables, without those that lead Python to the repository, and without settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MARLAAS_"))}


def lend(folder: Path, *, lender: Path | None = None) -> None:
    """Lends an environment the packages of another, or this one's, so that pip installs only what they are not, or not in a version that
    is wanted. What imports torch wherever it is, such as the tinker SDK, is better off without this one's."""
    (packages := folder / PACKAGES).mkdir(parents=True, exist_ok=True)
    (packages / "lent.pth").write_text(str(lender / PACKAGES) if lender else sysconfig.get_path("purelib"))


def lent() -> str:
    """Differs where this environment has other packages: what borrowed them lacks those that it was made beside."""
    names = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    return sha256("\n".join(names).encode()).hexdigest()[:8]


def build(into: Path, project: str = ".") -> Path:
    """A project's wheel, built from a copy of the tracked files."""
    copy = into / "checkout"
    if not copy.exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    wheels = into / "wheels" / project
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy / project)]
    subprocess.run(command, check=True, env=environment(), timeout=INSTALL_S)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *, borrowed: bool = False) -> Installed:
    """An environment with a wheel and what it needs. `borrowed`: what it needs is this process's, which takes minutes to install
    anew; editable packages, such as the repository, are not lent."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=INSTALL_S)
    installed = Installed(folder)
    if borrowed:
        (installed.packages / "borrowed.pth").write_text(
            "\n".join(entry for entry in sys.path if entry.endswith("-packages"))
        )
    options = ["--no-deps"] if borrowed else []
    command = [*PIP, "--python", str(folder / "bin" / "python"), "install", *options, str(wheel)]
    subprocess.run(command, check=True, env=environment(), timeout=INSTALL_S)
    return installed


@contextmanager
def up(installed: Installed, cwd: Path) -> Generator[dict[str, Any]]:
    """`marlaas up` in a user's folder; what it prints as JSON."""
    command = [installed.command("marlaas"), "up", "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline() or "null")
        finally:
            process.terminate()


def litter(folder: Path) -> None:
    """Makes a folder with packages of our names, which fail when they are imported."""
    for name in EVERYDAY:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('a folder of the user')\n")
