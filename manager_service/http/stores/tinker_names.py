"""Reads and makes names of the protocol: base models, `tinker://` paths, sessions, samplers, futures."""

import re
from dataclasses import dataclass
from typing import cast

from common.errors import InvalidInput, NotFound
from common.settings import stored_digest
from common.suggestions import did_you_mean, quoted
from common.wire.operations import Kind
from manager_service.http.context import Api, Base

MAX_NUMBER = 999_999
"""The largest number of a session's run or sampler."""

MAX_CHARACTERS = 512
"""Characters of a base model's name."""

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86_400

_SESSION = re.compile(r"ses-[0-9a-f]{16}")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")
_CHECKPOINT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
_FUTURE = re.compile(r"(run-[0-9a-f]{16}-\d{1,6}):(\d{1,10})")


@dataclass(frozen=True, slots=True)
class Path:
    """A checkpoint's name: `tinker://{run}/{kind}/{name}`."""

    run: str  # as its user names it, or a managed job
    kind: Kind
    name: str

    @property
    def is_jobs(self) -> bool:
        """Is it of a managed job, not of a run?"""
        return self.run.startswith("ftjob-")

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def base_named(api: Api, name: str) -> Base | None:
    """The base model of a name: ours, its source, or any path that ends in ours; None: it names none."""
    if len(name) > MAX_CHARACTERS or name.startswith("tinker://"):
        return None
    last = name.rstrip("/").rpartition("/")[2]
    of_source = (base for base in api.bases.values() if api.settings.models[base.name] == name)
    return api.bases.get(name) or api.bases.get(last) or next(of_source, None)


def find_base(api: Api, name: str, *, param: str = "base_model") -> Base:
    """The same. Raises InvalidInput, with the nearest name."""
    if found := base_named(api, name):
        return found
    unknown = f"unknown base model {quoted(name)}{did_you_mean(name.rpartition('/')[2], api.bases)}"
    told = f"{unknown if name else f'name a base model as `{param}`'}; there are: {', '.join(api.bases)}"
    raise InvalidInput(told, param=param, code="model_not_found")


def tokenizer_id(api: Api, base: Base) -> str:
    """The hub's name or the folder from which a client on this machine loads the tokenizer."""
    where = api.settings.models[base.name]
    is_here = base.folder.exists() and base.folder.as_posix().endswith(where.lstrip("./"))
    return str(base.folder) if is_here or stored_digest(where) else where


def parse_path(path: str) -> Path:
    """Raises InvalidInput."""
    found = _PATH.fullmatch(path)
    if found is None:
        raise InvalidInput(
            f"{path[:200]!r} names no checkpoint: tinker://RUN/weights/NAME, or tinker://RUN/sampler_weights/NAME",
            param="path",
        )
    return Path(found[1], cast(Kind, found[2]), found[3])


def ttl_fault(ttl_s: int | None) -> str:
    """The fault of a time to live; empty if it has none."""
    if ttl_s is None or MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        return ""
    return "ttl_seconds is between 3600 (an hour) and 315360000 (ten years)"


def is_checkpoint_name(name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None


def is_session(session: str) -> bool:
    return _SESSION.fullmatch(session) is not None


def numbered(number: int | None, what: str) -> int:
    """Raises InvalidInput unless a client may number its runs or samplers so."""
    if number is None or not 0 <= number <= MAX_NUMBER:
        raise InvalidInput(f"{what} is between 0 and {MAX_NUMBER}", param=what)
    return number


def run_name(session: str, number: int) -> str:
    """This service's name for a session's run."""
    return f"run-{session.removeprefix('ses-')}-{number}"


def sampler_name(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def parse_future(future: str) -> tuple[str, int]:
    """(run, number of the operation) of a future's id. Raises NotFound."""
    found = _FUTURE.fullmatch(future)
    if found is None:
        raise NotFound(f"there is no request {future[:200]!r}")
    return found[1], int(found[2])
