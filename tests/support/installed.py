"""MARLaaS as a new user has it: wheels built from the tracked files, in virtual environments of their own; and environments of other
packages, which are made once a machine."""

import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deploy.install import PIP as LOUD_PIP
from deploy.install import has_index

ROOT = Path(__file__).resolve().parents[2]
THIS = Path(sys.prefix).resolve()
"""This environment."""
PIP = (*LOUD_PIP, "-q")
PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
INSTALL_S = 300.0
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
"""The call to the build backend that installers make: pip asks it in three processes of its own."""
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


def made(name: str, wanted: Sequence[str], *, lender: Path | None = None) -> Path:
    """An environment in the user's cache, which is made when it is first needed. `wanted`: as pip and uv take it, options too. `lender`:
    the environment that lends it its packages, so that only what they are not, or not in a version that is wanted, is installed.
    What imports torch wherever it is, such as the tinker SDK, is better off without this one's.

    Raises OSError or SubprocessError if it cannot be made.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marlaas"
    folder = root / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    root.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        ready, made_of = folder / ".ready", f"{wanted} beside {lender}"
        if not ready.exists() or ready.read_text() != made_of:
            venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
            subprocess.run(venv, check=True, timeout=INSTALL_S)
            _fill(folder, wanted, lender)
            ready.write_text(made_of)
    return folder


def _fill(folder: Path, wanted: Sequence[str], lender: Path | None = None) -> None:
    """Installs by uv where `make` has installed it, in a fifth of pip's time, else by pip."""
    if lender is not None:
        (folder / PACKAGES / "lent.pth").write_text(str(lender / PACKAGES))
    if find_spec("uv") is None or has_index() or not _filled_by_uv(folder, wanted, lender):
        pip = [*PIP, "--python", str(folder), "install", *wanted]
        subprocess.run(pip, check=True, timeout=INSTALL_S, capture_output=True)


def _filled_by_uv(folder: Path, wanted: Sequence[str], lender: Path | None) -> bool:
    """Returns False, with uv's message, if it cannot. Asks for the lender what is missing: uv does not see what a .pth file lends."""
    try:
        missing = ["--no-deps", *_would_install(lender, wanted)] if lender else []
        _uv(folder, *dict.fromkeys([*missing, *wanted]))  # uv takes no option twice
    except subprocess.CalledProcessError as error:
        print(error.stderr)
        return False
    return True


def _would_install(folder: Path, wanted: Sequence[str]) -> list[str]:
    return re.findall(r"^ \+ (\S+==\S+)$", _uv(folder, "--dry-run", *wanted), re.M)


def _uv(folder: Path, *words: str) -> str:
    """Returns what it says."""
    uv = [sys.executable, "-m", "uv", "--color", "never", "pip", "install", "--python", str(folder / "bin" / "python")]
    return subprocess.run([*uv, *words], check=True, capture_output=True, text=True, timeout=INSTALL_S).stderr


def lent() -> str:
    """Differs between environments, and where this one has other packages: what borrowed them lacks those that it was made beside."""
    names = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    return sha256("\n".join([str(THIS), *names]).encode()).hexdigest()[:8]


def build(into: Path, project: str = ".") -> Path:
    """A project's wheel, built from a copy of the tracked files."""
    copy = into / "checkout"
    if not copy.exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    wheels = into / "wheels" / project
    wheels.mkdir(parents=True)
    command = [sys.executable, "-c", BUILD, str(wheels)]
    subprocess.run(
        command, cwd=copy / project, check=True, env=environment(), stdout=subprocess.DEVNULL, timeout=INSTALL_S
    )
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
    _fill(folder, [*(["--no-deps"] if borrowed else []), str(wheel)])
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
