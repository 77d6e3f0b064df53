"""Random numbers are functions of their coordinates, and the generator is the published one."""

from collections.abc import Callable

import numpy as np
import pytest

from common.rng import bits, key_of, permutation, permuted, philox, uniform, uniform_rows


def words(*values: int) -> list[np.ndarray]:
    return [np.array(value, np.uint64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox(key, words(*counter))) == expected


def test_a_number_does_not_depend_on_what_is_drawn_with_it() -> None:
    groups, samples = np.arange(6)[:, None], np.arange(5)[None, :]
    together = uniform(3, "sample", groups, samples)
    alone = [[float(uniform(3, "sample", group, sample)) for sample in range(5)] for group in reversed(range(6))]
    assert together.tolist() == alone[::-1]


def test_many_seeds_at_once_give_what_each_gives_alone() -> None:
    seeds = [0, 1, 2**40 + 5, 2**64 - 1]
    keys = np.array([key_of(seed, "sample") for seed in seeds], np.uint64)
    positions = np.arange(9)[None, :]
    rows = uniform_rows(keys, np.full((4, 1), 2), positions)
    assert rows.tolist() == [uniform(seed, "sample", 2, np.arange(9)).tolist() for seed in seeds]


@pytest.mark.parametrize("other", [(8, "sample", 1), (7 + 2**32, "sample", 1), (7, "data_order", 1), (7, "sample", 2)])
def test_seed_purpose_and_coordinate_each_make_another_stream(other: tuple[int, str, int]) -> None:
    ours, theirs = bits(7, "sample", 1, np.arange(1000)), bits(*other, np.arange(1000))
    assert not set(ours.tolist()) & set(theirs.tolist())


def test_more_than_four_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="at most four"):
        bits(0, "sample", 1, 2, 3, 4, 5)


@pytest.mark.parametrize("n", [1, 2, 97, 5000])
def test_an_epoch_visits_every_item_once(n: int) -> None:
    assert sorted(permutation(5, 0, n).tolist()) == list(range(n))
    assert sorted(permuted(5, 0, n, place) for place in range(n)) == list(range(n))


def whole_order(seed: int, epoch: int) -> list[int]:
    return permutation(seed, epoch, 100).tolist()


def order_by_place(seed: int, epoch: int) -> list[int]:
    return [permuted(seed, epoch, 100, place) for place in range(100)]


@pytest.mark.parametrize("order", [whole_order, order_by_place])
def test_epochs_and_seeds_differ_in_their_order_and_repeat_themselves(order: Callable[[int, int], list[int]]) -> None:
    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(each) for each in orders}) == 6
    assert orders[0] == order(0, 0)


def test_where_an_item_stands_in_a_large_files_order_says_nothing_about_its_place_in_the_file() -> None:
    n = 100_000
    found = [permuted(5, 1, n, place) for place in range(2000)]
    assert abs(float(np.mean(found)) / n - 0.5) < 0.03 and abs(float(np.corrcoef(found, range(2000))[0, 1])) < 0.1
