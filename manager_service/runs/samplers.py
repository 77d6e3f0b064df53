"""The samplers of one run: which version each samples with. They stand in a hash of their own, for there may be many."""

from collections.abc import Container, Mapping

import msgspec

from manager_service.jobs.changes import Changes
from manager_service.records import JSON
from manager_service.runs.records import SamplerState

MAX_SAMPLERS = 10_000
"""Samplers of one run: beyond, those of the oldest versions are forgotten."""
MAX_INFLIGHT = 1000
"""Samplers of these whose version follows the saves, so that each save writes them all; the oldest are forgotten."""


class RunSamplers:
    def __init__(self, key: str, known: dict[str, SamplerState]) -> None:
        """`key`: of the hash."""
        self._key = key
        self._known = known

    def add(self, name: str, sampler: SamplerState, changes: Changes) -> None:
        self._write(name, sampler, changes)
        inflight = [name for name, each in self._known.items() if each.inflight] if sampler.inflight else []
        if len(inflight) > MAX_INFLIGHT:
            self._drop(min(inflight, key=self._age), changes)
        if len(self._known) > MAX_SAMPLERS:
            self._drop(min(self._known, key=self._age), changes)

    def follow(self, version: int, changes: Changes) -> None:
        """Lets those that follow the saves sample with a new version."""
        for name, each in list(self._known.items()):
            if each.inflight:
                self._write(name, SamplerState(version, inflight=True), changes)

    def forget(self, versions: Container[int], changes: Changes) -> None:
        """Forgets those that sample with versions that go: they are long unused."""
        for name in [name for name, each in self._known.items() if each.version in versions]:
            self._drop(name, changes)

    def _age(self, name: str) -> tuple[int, int]:
        """The smallest is the oldest: by version, then by the number that its client gave it."""
        number = name.rpartition(":")[2]
        return self._known[name].version, int(number) if number.isdecimal() else 0

    def _write(self, name: str, sampler: SamplerState, changes: Changes) -> None:
        self._known[name] = sampler
        changes.open(self._key, name, JSON.encode(sampler).decode())

    def _drop(self, name: str, changes: Changes) -> None:
        del self._known[name]
        changes.close(self._key, name)


def read_samplers(record: Mapping[bytes, bytes]) -> dict[str, SamplerState]:
    """The samplers in `samplers:<run>`."""
    return {name.decode(): msgspec.json.decode(value, type=SamplerState) for name, value in record.items()}
