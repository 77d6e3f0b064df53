"""The rules of the code's structure that no other tool checks: who imports whom, who may catch everything, how long
things are, how full folders are, and that CONTRIBUTING and the packages name what is in them.

CONTRIBUTING's map is the fenced block in its section "Map of the folders", one folder a line. An indented name lies in the folder
above it; several names may share a line, separated by commas:

    manager_service/     decides
      jobs/              one job
      owner/, local/     others

Each package's `__init__.py` names its files and folders in the same way, in the indented lines of its docstring.
"""

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("manager_service", "rollout_service", "env_service", "trainer_service")
PRODUCT = ("common", "base_model", "marlaas_client", *SERVICES, "simulator", "chaos")
SHOWN = ("examples", "benchmarks", "harness", "models", "tests", "deploy")
WITHOUT_TORCH = ("common", "marlaas_client", "manager_service", "env_service", "simulator")

MAY_IMPORT = {
    "common": {"common"},
    "base_model": {"base_model", "common"},
    "marlaas_client": {"marlaas_client"},
    "manager_service": {"manager_service", "common", "marlaas_client"},
    "env_service": {"env_service", "common"},
    "rollout_service": {"rollout_service", "common", "base_model"},
    "trainer_service": {"trainer_service", "common", "base_model"},
    "simulator": {"simulator", "manager_service", "marlaas_client", "common"},
    "harness": {"harness", "common", "manager_service"},
    "chaos": {"chaos", "harness", "common", "manager_service", "env_service"},
    "examples": {"examples", "common", "manager_service", "marlaas_client", "env_service"},
    "benchmarks": {"benchmarks", "harness", *PRODUCT},
}

IMPORTERS = {
    "torch": {"base_model/", "rollout_service/embedded/", "trainer_service/"},
    "transformers": {
        "base_model/modules.py",
        "manager_service/launcher/commands/plan_command.py",
        "rollout_service/embedded/backbone/modules.py",
        "trainer_service/backbone/attention.py",
    },
    "peft": set[str](),
    "vllm": {"rollout_service/process/vllm_engine.py"},
    "redis": {
        "common/bus/bus.py",
        "common/bus/redis_connection.py",
        "manager_service/http/",
        "manager_service/launcher/elastic_pool.py",
        "manager_service/launcher/embedded_redis.py",
        "manager_service/launcher/supervisor.py",
        "manager_service/owner/transaction.py",
        "manager_service/records/stored.py",
    },
    "datasets": {"marlaas_client/dataset.py"},
    "pyarrow": {"marlaas_client/dataset.py"},
    "google": {"manager_service/http/tinker/wire/"},
    "zstandard": {"manager_service/http/tinker/wire/"},
    "obstore": {"common/store/objects.py"},
    "pickle": set[str](),
}
"""Foreign package -> the product's files and folders that may import it, and do."""

CATCHES_ALL = {
    "common/tasks/environments.py": "a package that cannot be imported is told of where its environment is named",
    "common/text/special_tokens.py": "the library of tokenizers raises nothing narrower",
    "common/worker/worker.py": "a handler's error ends as a dead letter, not as a dead worker",
    "env_service/handler.py": "an environment's error is a failed trajectory",
    "env_service/environments/catalogue.py": "a constructor's error is told where it is a failed trajectory",
    "env_service/live/sessions.py": "nobody waits for a session that cannot be closed",
    "env_service/sandbox/child.py": "whatever a tenant's code raises is its result",
    "env_service/environments/trl_factory.py": "a tool of a foreign environment: the model is told",
    "env_service/verifiers/host.py": "whatever a package raises fails its trajectory, or says why it cannot be loaded",
    "env_service/work.py": "an error goes to whoever waits for the shared call",
    "manager_service/scheduling/allocator.py": "one job's trouble must not stop the other tenants",
    "manager_service/http/tinker/retrieval.py": "a client that waits repeats at once after an error",
    "manager_service/http/tinker/futures/sample_futures.py": "an error goes to whoever asks for the samples",
    "trainer_service/backbone/loading.py": "compilers raise errors of many kinds: the kernel is left out, or refused",
    "manager_service/http/openai/environments.py": "a package whose arguments cannot be told stands in the list with the error",
    "manager_service/http/event_stream.py": "a stream's client must hear that it ended in an error",
    "manager_service/owner/owner.py": "a partition that cannot be loaded must not stop the others",
    "manager_service/owner/partition.py": "one job's trouble must not stop the other tenants' owner",
    "manager_service/owner/runs/runs.py": "one run's trouble must not stop the other tenants' owner",
    "manager_service/launcher/supervisor.py": "children are stopped before the error goes on",
    "manager_service/export/exporter.py": "one tenant's trouble must not stop what the others' jobs report",
    "manager_service/export/webhooks.py": "one tenant's trouble must not stop what the others' jobs report",
    "manager_service/export/writer.py": "whatever a logger raises is the job's answer",
    "trainer_service/driver.py": "an error goes to whoever waits for the step",
    "trainer_service/ranks/leader.py": "whatever fails in an operation of all ranks leaves them out of step",
    "rollout_service/process/process_engine.py": "whatever keeps an engine's process from starting may pass",
    "rollout_service/process/vllm_engine.py": "vLLM raises many kinds, which mean one of three things here",
    "rollout_service/embedded/fault_isolation.py": "an error goes to whoever waits for the turn",
    "rollout_service/embedded/torch_engine.py": "a failed forward ends its turns, not the engine's thread",
}

UNSHARED_THREADS = {
    "manager_service/http/server.py": "before the first request",
    "manager_service/owner/job_reader.py": "a job's files, of which an owner loads a few at a time",
    "manager_service/launcher/supervisor.py": "serves one person",
    "env_service/sandbox/sandbox.py": "deletes a call's folder, which is small",
}
"""Files of what serves many tenants that may use threads that tenants do not share by weight, each with its reason."""

READS_ENVIRONMENT = {
    "base_model/kernels.py",  # MKL takes its setting from there alone
    "common/settings.py",
    "env_service/verifiers/package_process.py",  # packages have the operator's variables, but for ours
    "common/children/prefork.py",  # gives a child its settings
    "manager_service/launcher/supervisor.py",
    "rollout_service/process/vllm_engine.py",  # vLLM takes some settings from there alone
    "trainer_service/ranks/leader.py",  # gloo takes its network interface from there alone
}

NAMED = tuple(package for package in PRODUCT if package != "chaos")
"""chaos/ is a client of the whole, with a cluster and tenants of its own; it shares hardly a class with the others."""
ALIKE = {
    "InvalidInput": "the client imports no service: the same error in both",
    "Unavailable": "as InvalidInput",
    "Job": "in the client the record of the API, in the manager what it tells of",
    "JobAction": "the client imports no service: the same words in both",
    "Status": "as JobAction",
}
"""Names that two classes, or aliases of types, may have, with the reason."""

LOOKED_AT = (
    ast.Attribute, ast.AsyncFunctionDef, ast.Call, ast.ClassDef, ast.ExceptHandler, ast.Expr, ast.FunctionDef, ast.If, ast.Import,
    ast.ImportFrom,
)  # fmt: skip
"""Kinds of nodes that the rules ask for."""

MAX_FILE, MAX_FUNCTION = 450, 38
MAX_FILES = 12
FULL_FOLDERS = {"marlaas_client/cli", "trainer_service"}
SIZED = ("common", "base_model", *SERVICES)
MAX_SIZED = 58_250
"""Lines of these packages together. A change that raises it says in its message what it bought; one that needs less lowers it."""
BUDGET = {
    "marlaas_client": 2_640,
    "simulator": 3_700,
    "harness": 1_700,
    "chaos": 1_700,
    "examples": 1_860,
    "deploy": 600,
    "tests": 48_350,
    "benchmarks": 7_750,
}
"""Lines of Python of the folders around them, at most."""
MAX_PAGE = 1_700
"""Lines of the page's own scripts, at most."""
"""They may hold more files: one noun each, or files that belong together."""


def files(*packages: str) -> list[str]:
    found = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@cache
def tree(file: str) -> ast.Module:
    """A file's syntax. The collector would look through those of all files, again and again, as they come."""
    gc.disable()
    try:
        return ast.parse((ROOT / file).read_text())
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(file: str) -> list[ast.AST]:
    """The nodes that the rules look at; not the names, constants and marks that most of a tree consists of."""
    return [node for node in ast.walk(tree(file)) if isinstance(node, LOOKED_AT)]


@cache
def imports(file: str) -> list[str]:
    """Full names of the modules that a file imports, inside of functions too."""
    names: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.append(node.module or "")
    return names


def module_names(*packages: str) -> list[str]:
    return [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files(*packages)]


# ---- dependencies point down ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    ours = {*PRODUCT, *SHOWN}
    wrong = [
        f"{file} imports {name}"
        for file in files(package)
        for name in imports(file)
        if (top := name.split(".")[0]) in ours and top not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("foreign", IMPORTERS)
def test_a_heavy_or_replaceable_package_is_imported_in_the_listed_places_alone(foreign: str) -> None:
    found = {file for file in files(*PRODUCT) if any(name.split(".")[0] == foreign for name in imports(file))}
    places = IMPORTERS[foreign]
    assert [file for file in sorted(found) if not file.startswith(tuple(places))] == []
    assert [place for place in sorted(places) if not any(file.startswith(place) for file in found)] == []


def imported_files(file: str) -> Iterator[str]:
    """The product's files that a file imports, also for types."""
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.replace(".", "/")
            names = [f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)]
            yield from (name for name in names if (ROOT / name).is_file())


def test_no_modules_import_each_other_in_a_circle() -> None:
    waiting = {file: set(imported_files(file)) for file in files(*PRODUCT)}
    while free := {file for file, needs in waiting.items() if not needs & set(waiting)}:
        waiting = {file: needs for file, needs in waiting.items() if file not in free}
    assert sorted(waiting) == []


def test_services_start_without_torch_or_at_least_without_what_takes_seconds_to_import() -> None:
    """One process imports what computes nothing, then a trainer of one rank and a rollout worker."""
    names = module_names(*WITHOUT_TORCH)
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'peft'} & set(sys.modules)))\n"
        "import trainer_service.__main__, rollout_service.__main__\n"
        "print(sorted({'transformers', 'torch._dynamo', 'torch.distributed.fsdp', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["[]", "[]"], "")


@pytest.mark.parametrize(("one", "other"), [("http", "owner"), ("owner", "http")])
def test_the_two_programs_of_the_manager_meet_in_records_and_scheduling_alone(one: str, other: str) -> None:
    """The HTTP API and the owners could be deployed apart."""
    wrong = [
        f"{file} imports {name}"
        for file in files(f"manager_service/{one}")
        for name in imports(file)
        if f"{name}.".startswith(f"manager_service.{other}.")
    ]
    assert wrong == []


def test_only_the_wiring_of_the_api_imports_the_tinker_protocol() -> None:
    """And the helpers, which parse its bodies."""
    wiring = {f"manager_service/http/{file}" for file in ("app.py", "server.py", "reading/tasks.py")}
    tinker = "manager_service/http/tinker/"
    others = [file for file in files("manager_service/http") if not file.startswith(tinker) and file not in wiring]
    assert [file for file in others if any(name.startswith(tinker) for name in imported_files(file))] == []


def test_the_simulator_imports_no_other_benchmark() -> None:
    found = {name for file in files("simulator") for name in imports(file) if name.startswith("benchmarks")}
    assert {name for name in found if not name.startswith("simulator")} == set()


# ---- one word, one thing --------------------------------------------------------------------------------------------


def types_of(file: str) -> Iterator[str]:
    """The classes and aliases of types that a file makes; no type variables, no parameters of requests and commands."""
    yield from (node.name for node in nodes(file) if isinstance(node, ast.ClassDef))
    for node in tree(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if not ast.unparse(node.value).startswith("Annotated"):
                yield from (name for name in names if re.fullmatch(r"[A-Z]+[a-z]\w*", name))


def test_no_two_types_share_a_name() -> None:
    names = Counter(name for file in files(*NAMED) if not file.endswith("_pb2.py") for name in types_of(file))
    assert {name for name, num in names.items() if num > 1} - ALIKE.keys() == set()


SAME_FILE_NAMES = {"env_service": {"environment.py"}}
"""Names that two files of a package share: operators import `Step` from one, `Verifiers` from the other."""


@pytest.mark.parametrize("package", SIZED)
def test_no_two_files_of_a_package_share_a_name(package: str) -> None:
    names = Counter(Path(file).name for file in files(package))
    twice = {name for name, num in names.items() if num > 1}
    assert twice - {"__init__.py", "__main__.py", "settings.py"} == SAME_FILE_NAMES.get(package, set[str]())


HEADLESS = (
    "What", "Whose", "Which", "Who", "Where", "When", "Whether", "Why", "How", "By", "Until", "Of", "Those", "That", "To",
    "Between", "Beside", "Before", "As", "In", "From", "Likewise", "Gone",
)  # fmt: skip


def docstrings(file: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string that stands by itself: docstrings of modules, classes, functions, fields, constants."""
    for node in nodes(file):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def test_a_docstring_starts_with_a_verb_or_a_noun_phrase() -> None:
    wrong = [
        f"{file}:{line}: {text[:60]}"
        for file in files(*PRODUCT, *SHOWN)
        for line, text in docstrings(file)
        if re.match(rf"\W*(?:{'|'.join(HEADLESS)})\b", text)
    ]
    assert wrong == []


# ---- one place each -------------------------------------------------------------------------------------------------


def files_with(looked_for: Callable[[ast.AST], bool], *packages: str) -> set[str]:
    return {file for file in files(*packages) if any(map(looked_for, nodes(file)))}


def _catches_all(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    if node.type is None:
        return True
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def test_everything_is_caught_only_at_the_listed_boundaries() -> None:
    assert files_with(_catches_all, *PRODUCT) == set(CATCHES_ALL)


def test_tenants_share_threads_but_in_the_listed_places() -> None:
    found = files_with(lambda node: _attribute(node) == "to_thread", "manager_service", "env_service")
    assert found == set(UNSHARED_THREADS)


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def test_only_programs_for_people_print() -> None:
    printing = files_with(
        lambda node: isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print",
        *PRODUCT,
    )
    programs = ("manager_service/launcher/commands/", "marlaas_client/cli/")
    assert [file for file in sorted(printing) if not file.startswith(programs)] == []


def test_the_environment_is_read_in_the_settings_alone() -> None:
    assert files_with(lambda node: _attribute(node) in ("environ", "getenv"), *PRODUCT) == READS_ENVIRONMENT


def test_no_path_of_somebodys_machine_is_in_the_repository() -> None:
    own = re.compile(r"(?<![\w.}])/(?:home|work|root|Users)/\w")
    texts = (".py", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", "Makefile")
    folders = [ROOT / name for name in (*PRODUCT, *SHOWN, "docs", ".ci")]
    wrong = [
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
        if path.is_file() and path.name.endswith(texts) and own.search(path.read_text(errors="replace"))
    ]
    assert wrong == []


# ---- small ----------------------------------------------------------------------------------------------------------


def test_files_and_functions_are_short() -> None:
    long_files = {
        file: lines
        for file in files(*PRODUCT, "examples", "models")
        if (lines := len((ROOT / file).read_text().splitlines())) > MAX_FILE
    }
    long_functions = {
        f"{file}:{node.name}": lines
        for file in files(*PRODUCT, "examples", "models")
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION
    }
    assert (long_files, long_functions) == ({}, {})


def num_lines(paths: Iterable[str]) -> int:
    return sum((ROOT / path).read_text().count("\n") for path in paths)


def test_packages_stay_within_their_budget_of_lines() -> None:
    assert num_lines(files(*SIZED)) <= MAX_SIZED
    lines = {folders: num_lines(files(*folders.split())) for folders in BUDGET}
    assert {folders: num for folders, num in lines.items() if num > BUDGET[folders]} == {}
    scripts = (ROOT / "manager_service" / "http" / "page").glob("*.js")
    assert num_lines(str(script) for script in scripts if ".min." not in script.name) <= MAX_PAGE


def test_no_folder_of_a_service_is_a_heap() -> None:
    number = Counter(Path(file).parent.as_posix() for file in files(*SERVICES, "marlaas_client", "simulator", "chaos"))
    assert {folder for folder, num in number.items() if num > MAX_FILES} <= FULL_FOLDERS


# ---- maps -----------------------------------------------------------------------------------------------------------


def mapped(lines: str) -> set[str]:
    """Paths that a map names, folders without the slash at their end."""
    paths: set[str] = set()
    folders: list[tuple[int, str]] = []  # indentation, path
    for line in filter(str.strip, lines.splitlines()):
        indent = len(line) - len(line.lstrip())
        folders = [(depth, path) for depth, path in folders if depth < indent]
        names = re.match(r"[^\s,]+(?:, [^\s,]+)*", line.strip())
        assert names is not None
        for name in names[0].split(", "):
            path = f"{folders[-1][1]}/{name}" if folders else name
            paths.add(path.rstrip("/"))
            if name.endswith("/"):
                folders.append((indent, path.rstrip("/")))
    return paths


def test_a_map_is_read_by_indentation() -> None:
    lines = "a/          one\n  b.py      two\n  c/        three\n    d.py, e.py   4\nf.md  5\n"
    assert mapped(lines) == {"a", "a/b.py", "a/c", "a/c/d.py", "a/c/e.py", "f.md"}


def test_the_map_names_each_folder_that_there_is() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^#+ Map of the folders$.*?^```\w*\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert section is not None, 'CONTRIBUTING has no section "Map of the folders" with a fenced block'
    paths = mapped(section[1])
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith((".", "_", "build")) and any(path.iterdir())
    }
    packages = {Path(file).parent.as_posix() for file in files(*PRODUCT)}
    missing = {name for name in folders if not name.endswith(".egg-info")} | packages
    assert sorted(missing - paths) == []


@pytest.mark.parametrize("package", sorted({Path(file).parent.as_posix() for file in files(*PRODUCT)}))
def test_a_package_names_its_files_and_folders(package: str) -> None:
    text = ast.get_docstring(tree(f"{package}/__init__.py"), clean=False) or ""
    named = re.findall(r"^    (\w+(?:\.py|/)) {2,}\S", text, re.MULTILINE)
    there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    assert sorted(named) == sorted(there)
