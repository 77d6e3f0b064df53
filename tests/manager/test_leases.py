"""Partitions are shared evenly by the live owners of a cell, and by the weight of their tenants' work."""

from itertools import pairwise

from common.bus.bus import Bus
from common.bus.streams import NUM_PARTITIONS
from manager_service.owner.leases import LONGEST_ABSENCE_S, Absence, Leases, LeaseState, Round
from tests.common.test_worker import until


def mine(found: Round) -> set[int]:
    return {partition for partition, held in found.leases.items() if held is not LeaseState.BY_ANOTHER}


async def share(*owners: Leases) -> None:
    """Each takes what is free, and gives back what is beyond its share."""
    for owner in owners:
        found = await owner.round({})
        for partition in sorted(mine(found))[found.share :]:
            await owner.release(partition)


async def test_owners_that_come_get_their_share_and_those_that_go_leave_it(bus: Bus) -> None:
    # Given three owners, of which the first was there before the others
    owners = [Leases(bus, name, 60) for name in ("one", "two", "three")]
    await owners[0].round({})
    for _ in range(3):
        await share(*owners)
    # Then each partition has one owner, and none has more than its share
    shares = [mine(await owner.round({})) for owner in owners]
    assert sorted(map(len, shares)) == [4, 6, 6]
    assert set.union(*shares) == set(range(NUM_PARTITIONS))
    # When one leaves, the others have its part at once
    await owners[1].leave()
    shares = [mine(await owner.round({})) for owner in (owners[0], owners[2])]
    assert sorted(map(len, shares)) == [8, 8]


async def test_who_leaves_free_partitions_to_others_keeps_its_own_and_the_others_get_beyond_their_share(
    bus: Bus,
) -> None:
    one, two = Leases(bus, "one", 60), Leases(bus, "two", 60)
    await share(one, two, one)
    await two.round({})
    left = max(mine(await one.round({})))
    await one.release(left)
    assert left not in mine(await one.round({}, leaves=True))
    assert left in mine(await two.round({}))
    kept = await one.round({}, leaves=True)
    assert len(mine(kept)) == NUM_PARTITIONS // 2 - 1 and kept.surplus == 0


async def test_capacity_goes_to_where_the_active_tenants_are(bus: Bus) -> None:
    # Given two owners, one with a tenant of weight 3, the other with one of weight 1
    one, two = Leases(bus, "one", 60), Leases(bus, "two", 60)
    await share(one, two, one)
    await two.round({})
    await one.round({0: 3.0, 1: 0.0})
    assert (await two.round({15: 1.0})).other_weight == 3.0
    assert (await one.round({0: 3.0, 1: 0.0})).other_weight == 1.0
    assert (await one.round({0: 0.0})).other_weight == 1.0
    assert (await two.round({15: 1.0})).other_weight == 0.0


async def test_owners_hear_what_jobs_and_samplers_were_served(bus: Bus) -> None:
    one, two = Leases(bus, "one", 60), Leases(bus, "two", 60)
    await one.round({}, 1.5)
    await two.round({}, 2.0)
    await bus.client.set(bus.cell.sampling, "3.0")
    await bus.client.hset(bus.cell.served, "rollout", "0.5")
    found = await one.round({0: 4.0})
    assert (found.served, found.sampling_weight, found.other_weight) == ({"jobs": 3.5, "rollout": 0.5}, 3.0, 0.0)


async def test_a_lease_that_was_not_renewed_is_anothers(bus: Bus) -> None:
    # Given an owner that sleeps longer than its lease
    one, two = Leases(bus, "one", 0.05), Leases(bus, "two", 60)
    await one.round({})
    await until(lambda: _free(bus))
    # Then another has all of them, and the first holds nothing
    assert set((await two.round({})).leases.values()) == {LeaseState.TAKEN}
    assert not one.surely_held(0)
    assert mine(await one.round({})) == set()


def test_owners_none_of_which_has_room_pass_a_partition_to_and_fro_ever_more_rarely() -> None:
    # Given two owners, each of which leaves a partition as soon as the other is back
    now_s, changes_s, owners = 0.0, list[float](), (Absence(60), Absence(60))
    while now_s < 40_000:
        leaving, other = owners[len(changes_s) % 2], owners[(len(changes_s) + 1) % 2]
        while other.lasts(now_s):
            now_s += 1
        leaving.begin(now_s)
        changes_s.append(now_s)
    # Then each absence is longer than the one before, up to an hour
    absences = [later - since for since, later in pairwise(changes_s)]
    assert absences[:6] == [60, 60, 120, 120, 240, 240] and max(absences) == LONGEST_ABSENCE_S
    # And it is short again for one that had room for long
    owners[0].begin(100_000)
    assert owners[0].lasts(100_059) and not owners[0].lasts(100_060)


async def _free(bus: Bus) -> bool:
    return not await bus.client.exists(*(bus.cell.lease(p) for p in range(NUM_PARTITIONS)))
