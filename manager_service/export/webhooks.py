"""Tells tenants' webhooks of the ends of jobs, signed as OpenAI signs (Standard Webhooks), at least once.

reads: ends, job:<job>, webhooks:<tenant>     writes: ends
holds: which webhooks have taken an event (lost in a crash: all are called again)
An entry of `ends` goes once every webhook has taken the event, or is given up, as the job's events then say.
A repeat has the same `webhook-id`.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import standardwebhooks
import structlog

from common.cancellation import cancel_all
from common.errors import Unavailable
from common.outgoing import Caller, CallFailed, NotAllowed
from common.sharing.places import Places
from manager_service.export import notes
from manager_service.export.cells import JobCell
from manager_service.records.job_records import JobState
from manager_service.records.keys import JSON
from manager_service.records.receivers import Receivers, Webhook
from manager_service.records.sample_records import Limits

LOOK_EVERY_S = 1.0
FIRST_WAIT_S, MOST_WAIT_S = 5.0, 3600.0
"""Time between two tries."""
TIMEOUT_S = 10.0
CALLS, DELIVERIES_A_TENANT = 32, 4
"""Calls at once, and deliveries of one tenant, each of which makes one call at a time."""
MAX_WAITING = 1000
"""Most ends of one tenant's jobs that wait for webhooks; the oldest beyond that are given up."""

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class WebhookDelivery:
    """The end of one job, on its way to the tenant's webhooks."""

    cell: JobCell
    tenant: str
    job: str
    ended_at: float
    taken: set[str] = field(default_factory=set[str])  # ids of webhooks that have taken it, or never will
    num_tries: int = 0
    num_waits: int = 0
    excess: bool = False  # it is given up, since too many wait
    due: float = 0.0  # by the monotonic clock

    @property
    def entry(self) -> str:
        return f"{self.tenant} {self.job}"


class Webhooks:
    """Delivers. `first_wait_s`: before the second try; it doubles from try to try."""

    def __init__(
        self,
        cells: Sequence[JobCell],
        receivers: Receivers,
        caller: Caller,
        *,
        give_up_s: float,
        limits: Limits,
        first_wait_s: float = FIRST_WAIT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`give_up_s`: after a job's end."""
        self._cells = cells
        self._receivers = receivers
        self._caller = caller
        self._give_up_s = give_up_s
        self._limits = limits
        self._first_wait_s = first_wait_s
        self._timeout_s = timeout_s
        self._places = Places(lambda: CALLS)
        self._deliveries: dict[str, WebhookDelivery] = {}  # by entry
        self._busy: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                await self._look()
                self._begin()
                await asyncio.sleep(min(LOOK_EVERY_S, self._first_wait_s))
        finally:
            await cancel_all(self._busy.values())

    async def _look(self) -> None:
        there: dict[str, WebhookDelivery] = {}
        for cell in self._cells:
            key, client = cell.bus.cell.ends, cell.bus.client
            entries: Any = await cell.bus.retrying(
                lambda client=client, key=key: client.zrange(key, 0, -1, withscores=True)
            )
            for entry, ended_at in ((entry.decode(), at) for entry, at in entries):
                tenant, job = entry.split()
                there[entry] = self._deliveries.get(entry) or WebhookDelivery(cell, tenant, job, ended_at)
        self._deliveries = there

    def _begin(self) -> None:
        """Begins what is due, a limited number of each tenant's, oldest first."""
        self._busy = {entry: task for entry, task in self._busy.items() if not task.done()}
        waiting = Counter(delivery.tenant for delivery in self._deliveries.values())
        busy = Counter(entry.split()[0] for entry in self._busy)
        for entry, delivery in self._deliveries.items():
            if waiting[delivery.tenant] > MAX_WAITING:
                waiting[delivery.tenant] -= 1
                delivery.excess = True
            due = delivery.excess or delivery.due <= time.monotonic()
            if due and entry not in self._busy and busy[delivery.tenant] < DELIVERIES_A_TENANT:
                busy[delivery.tenant] += 1
                self._busy[entry] = asyncio.create_task(self._guarded(delivery))

    async def _guarded(self, delivery: WebhookDelivery) -> None:
        try:
            await self._deliver(delivery)
        except Exception as error:  # the boundary: one tenant's trouble must not stop the others' reports
            log.warning(
                "delivery_failed", job_id=delivery.job, reason=str(error), exc_info=not isinstance(error, Unavailable)
            )
            self._wait(delivery)

    def _wait(self, delivery: WebhookDelivery) -> None:
        wait_s = min(MOST_WAIT_S, self._first_wait_s * 2 ** min(delivery.num_waits, 16))
        delivery.num_waits += 1
        delivery.due = time.monotonic() + wait_s

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        """One try at each webhook that has not taken the event."""
        cell = delivery.cell
        webhooks: list[Webhook] = await cell.bus.retrying(lambda: self._receivers.webhooks(delivery.tenant))
        webhooks = [one for one in webhooks if one.created_at <= delivery.ended_at and one.id not in delivery.taken]
        found = await cell.job(delivery.tenant, delivery.job) if webhooks else None
        if found is not None:
            kind = f"fine_tuning.job.{found.state.status}"
            listening = [one for one in webhooks if kind in one.events]
            body = JSON.encode(event_of(delivery.job, kind, found.state))
            if listening and delivery.excess:
                waiting = f"more than {MAX_WAITING} ends of your jobs wait for webhooks"
                text = f"No webhook hears of this job's end: {waiting}"
                await notes.warn(cell, delivery.tenant, delivery.job, text, self._limits)
                listening.clear()
            delivery.num_tries += 1
            if [name for one in listening if (name := await self._try(delivery, one, body))]:
                return self._wait(delivery)
        await cell.bus.retrying(lambda: cell.bus.client.zrem(cell.bus.cell.ends, delivery.entry))

    async def _try(self, delivery: WebhookDelivery, webhook: Webhook, body: bytes) -> str:
        """The reason to try it again; empty if it is not to be tried."""
        reason, for_good = await self._call(delivery, webhook, body)
        late = time.time() - delivery.ended_at >= self._give_up_s
        if reason:
            log.warning(
                "webhook_failed", job_id=delivery.job, webhook=webhook.id, tries=delivery.num_tries, reason=reason
            )
        if reason and not (for_good or late):
            return reason
        if reason:
            host = httpx.URL(webhook.url).host
            text = f"The webhook {webhook.id} at {host} did not take this job's end in {delivery.num_tries} tries: {reason}"
            await notes.warn(delivery.cell, delivery.tenant, delivery.job, text, self._limits)
        delivery.taken.add(webhook.id)
        return ""

    async def _call(self, delivery: WebhookDelivery, webhook: Webhook, body: bytes) -> tuple[str, bool]:
        """The reason why the webhook did not take the event (empty: it did), and whether it never will."""
        async with self._places.one(delivery.tenant, 1.0, lambda: None):
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, _ = await self._caller.post(webhook.url, signed(webhook.secret, delivery.job, body), body)
            except NotAllowed as error:
                return str(error), True
            except CallFailed as error:
                return str(error), False
            except TimeoutError:
                return f"no answer within {self._timeout_s:g} s", False
        return ("", False) if 200 <= status < 300 else (f"answered with status {status}", False)


def event_of(job: str, kind: str, state: JobState) -> dict[str, Any]:
    """The body, as OpenAI has it."""
    data = {"id": job}
    return {"object": "event", "id": _id(job), "type": kind, "created_at": state.finished_at, "data": data}


def _id(job: str) -> str:
    """The same for each try of each exporter, since a job ends once. Receivers drop repeats by it."""
    return f"evt_{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def signed(secret: str, job: str, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks. `secret`: `whsec_` and base64."""
    name, now = _id(job), datetime.now(UTC)
    return {
        "webhook-id": name,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": standardwebhooks.Webhook(secret).sign(name, now, body.decode()),
    }
