"""/v1/fine_tuning/jobs/{id}/samples: what a job's steps were trained on; one of them token by token; all as JSONL."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi import Path as PathParameter
from starlette.responses import Response, StreamingResponse

from common.errors import NotFound
from manager_service.http.context import Api, Parts, Tenant
from manager_service.http.errors import COMMON, declared
from manager_service.http.reading.tasks import Decode, Spell
from manager_service.http.schemas import ConversationObject, Page, SampleObject, TurnObject
from manager_service.http.stores.job_store import JobRow, JobStore
from manager_service.records.archive import SampleFiles, sample_versions
from manager_service.records.keys import JSON
from manager_service.records.sample_records import SampleRecord, Written
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"], responses={**COMMON, **declared(404)})

MAX_STEP = 99_999_999
MOST_LATE = 3
"""Newest steps whose samples may not be written yet, or were lost with their owner."""
Step = Annotated[int, PathParameter(ge=0, le=MAX_STEP)]
Number = Annotated[int, PathParameter(ge=0, lt=2**53)]
BYTES_A_TOKEN = 4
"""An estimate, for the work of spelling tokens."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The samples that are asked for."""

    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None
    failed: Annotated[bool | None, Query(description="Only those that failed, or only those that did not")] = None
    item: Annotated[int | None, Query(ge=0, lt=2**53, description="Of evaluations: its place in the held-out file")] = (
        None
    )

    def takes(self, one: SampleRecord) -> bool:
        """A sample without a reward is in no range."""
        if self.failed not in (None, one.failure is not None) or self.item not in (None, one.item):
            return False
        if one.reward is None:
            return self.min_reward is None and self.max_reward is None
        enough = self.min_reward is None or one.reward >= self.min_reward
        return enough and (self.max_reward is None or one.reward <= self.max_reward)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that are exported."""

    from_step: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="With format=jsonl: the first")] = None
    to_step: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="With format=jsonl: the last")] = None

    newest: Annotated[
        int | None, Query(ge=1, le=MAX_STEP, description="With format=jsonl: so many of them, the last")
    ] = None

    def among(self, kept: Sequence[int]) -> Sequence[int]:
        """`kept`: ascending."""
        first, last = self.from_step or 0, MAX_STEP if self.to_step is None else self.to_step
        within = [step for step in kept if first <= step <= last]
        return within if self.newest is None else within[-self.newest :]


@router.get(
    "/samples",
    response_model=Page[SampleObject],
    responses={200: {"content": {"application/jsonl": {}}, "description": "With `format=jsonl` whole conversations"}},
)
async def samples(
    api: Parts,
    tenant: Tenant,
    job_id: str,
    wanted: Annotated[Filter, Depends()],
    steps: Annotated[Steps, Depends()],
    version: Annotated[
        int | None,
        Query(ge=0, le=MAX_STEP, description="That was trained on them, or evaluated; the newest if absent"),
    ] = None,
    evaluation: Annotated[
        bool, Query(description="What evaluations were answered, instead of what steps were trained on")
    ] = False,
    format: Annotated[
        Literal["json", "jsonl"], Query(description="jsonl: a line a sample, of all steps if no version is given")
    ] = "json",
) -> Response:
    """Samples that are kept of each step: its first groups, the best and the worst of the others, and some that failed; and of each
    evaluation what the first held-out items were answered."""
    row = await JobStore(api).find(tenant.id, job_id)
    if format == "jsonl":
        kept = [version] if version is not None else await _versions(row, evaluation)
        lines = _lines(api, tenant, row, wanted, steps.among(kept), evaluation)
        return StreamingResponse(lines, media_type="application/jsonl")
    found = await _read(row, version, evaluation)
    if wanted != Filter():
        found = JSON.encode([one for one in await _decoded(api, tenant, found) if wanted.takes(one)])
    return Response(_page_of_samples(found), media_type="application/json")


def _page_of_samples(records: bytes) -> bytes:
    """A Page[SampleObject] of SampleRecords in JSON, as they are: to decode large groups would stop the event loop."""
    return b'{"object":"list","data":' + records + b',"first_id":null,"last_id":null,"has_more":false}'


def _files(row: JobRow, evaluation: bool) -> SampleFiles:
    return row.base.archive.answer_files if evaluation else row.base.archive.sample_files


async def _versions(row: JobRow, evaluation: bool) -> list[int]:
    """Versions that may have samples, ascending; the last one has some."""
    files, tenant, job = _files(row, evaluation), row.spec.tenant, row.spec.id
    if evaluation:
        return await files.versions(tenant, job) if row.spec.num_eval_items else []
    found = sample_versions(row.state)
    for _ in range(MOST_LATE):
        if found and not await files.has(tenant, job, found[-1]):
            found.pop()
    return found


async def _read(row: JobRow, version: int | None, evaluation: bool) -> bytes:
    """A list of SampleRecord in JSON. Without a version: of the newest that has some."""
    if version is None:
        version = max(await _versions(row, evaluation), default=0)
    return await _files(row, evaluation).read(row.spec.tenant, row.spec.id, version)


async def _decoded(api: Api, tenant: TenantRecord, records: bytes) -> list[SampleRecord]:
    return await api.helpers.beside(tenant, partial(msgspec.json.decode, records, type=list[SampleRecord]))


# ---- as JSONL -------------------------------------------------------------------------------------------------------


async def _lines(
    api: Api, tenant: TenantRecord, row: JobRow, wanted: Filter, found: Sequence[int], evaluation: bool
) -> AsyncIterator[bytes]:
    """The samples of steps, or of evaluations; memory holds those of one."""
    for step in found:
        kept = await _decoded(api, tenant, await _read(row, step, evaluation))
        chosen = [one for one in kept if wanted.takes(one)]
        turns = [_stretches(one.written or NOTHING) for one in chosen]
        pieces = [ids for own in turns for _, ids in own]
        size = BYTES_A_TOKEN * sum(map(len, pieces))
        texts = iter(await api.helpers.do(tenant, Decode(row.base.name, pieces), num_bytes=size) if pieces else ())
        for one, own in zip(chosen, turns, strict=True):
            yield _line(step, one, [{"by": by, "text": next(texts)} for by, _ in own])


def _line(step: int, one: SampleRecord, turns: list[dict[str, str]]) -> bytes:
    return JSON.encode({**msgspec.to_builtins(one), "step": step, "turns": turns}) + b"\n"


# ---- one of them ----------------------------------------------------------------------------------------------------


@router.get("/samples/{step}/{group}/{sample}")
async def conversation(
    api: Parts, tenant: Tenant, job_id: str, step: Step, group: Number, sample: Number, evaluation: bool = False
) -> ConversationObject:
    """A sample as it was written: turn by turn, token by token. `step`: as `version` in the list of samples."""
    row = await JobStore(api).find(tenant.id, job_id)
    kept = await _decoded(api, tenant, await _read(row, step, evaluation))
    found = next((one for one in kept if (one.group, one.sample) == (group, sample)), None)
    if found is None:
        if evaluation:
            raise NotFound(f"the evaluation of version {step} kept no answer {sample} to item {group}")
        raise NotFound(f"step {step} kept no sample {sample} of group {group}")
    written = found.written or NOTHING
    asked = Spell(row.base.name, written.tokens)
    spelt: list[str] = await api.helpers.do(tenant, asked, num_bytes=BYTES_A_TOKEN * len(written.tokens))
    shown = SampleObject.model_validate(msgspec.to_builtins(msgspec.structs.replace(found, written=None)))
    return ConversationObject(step=step, sample=shown, turns=_turns(written, spelt), num_dropped=written.num_dropped)


NOTHING = Written([], [], [])
By = Literal["prompt", "model", "environment"]


def _stretches(written: Written, tokens: Sequence[Any] | None = None) -> list[tuple[By, list[Any]]]:
    """The writer of each stretch with tokens, and these: ids, or what `tokens` has in their place."""
    found: list[tuple[By, list[Any]]] = []
    at, tokens = 0, written.tokens if tokens is None else tokens
    for place, length in enumerate(written.lengths):
        if length:
            by: By = "prompt" if place == 0 else "model" if place % 2 else "environment"
            found.append((by, list(tokens[at : at + length])))
        at += length
    return found


def _turns(written: Written, spelt: Sequence[str]) -> list[TurnObject]:
    turns: list[TurnObject] = []
    said = 0
    for by, tokens in _stretches(written, spelt):
        logprobs = written.logprobs[said : said + len(tokens)] if by == "model" and written.logprobs else None
        turns.append(TurnObject(by=by, tokens=tokens, logprobs=logprobs))
        said += len(logprobs or ())
    return turns
