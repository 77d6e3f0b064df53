"""Refuses a Redis whose records and messages another version of MARLaaS wrote in another format."""

from typing import Any

from common.errors import InvalidInput
from manager_service.records.keys import GLOBAL
from manager_service.records.tenants import TENANTS

FORMAT = "5"
"""Raised when a message or record of before cannot be read any more. 2: `Step` became `TrainStep`. 3: what a run's
samplers sample with left its state, and the bytes of files are counted. 4: tokens travel as transcripts that refer to histories.
5: samples are objects in the storage, and records of runs moved."""
KEY = GLOBAL + "format"


async def check_format(redis: Any) -> None:
    """Marks an empty Redis. Raises InvalidInput for one of another format."""
    found = await redis.get(KEY)
    if found is None and await redis.exists(TENANTS):
        found = b"1"
    elif found is None:
        await redis.set(KEY, FORMAT, nx=True)
        found = FORMAT.encode()
    if found != FORMAT.encode():
        raise InvalidInput(
            f"this Redis holds data of another version of MARLaaS (format {found.decode()}, this one reads {FORMAT}): run it "
            "with that version, or start with an empty one (marlaas up --data ANOTHER_FOLDER)"
        )
