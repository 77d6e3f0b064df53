"""Workers that pass files on to each other."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # most tests do not need it
    from tests.common.test_peers import World


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> "AsyncGenerator[World]":
    from tests.common.test_peers import DATA, PATH, World

    world = World(redis_url, tmp_path)
    await world.objects.write(PATH, DATA)
    async with world.stack, asyncio.timeout(60):
        yield world
