"""Waits, for `marlaas up`, until the folder of the local store is the one that the cells know."""

from collections.abc import Callable, Mapping
from pathlib import Path

from common.known_store import recognised
from common.settings import parse_base_models
from common.store_folder import StoreFolder
from manager_service.local.embedded_redis import make_private


async def wait_for_store(
    environment: Mapping[str, str], data_dir: Path, redis_url: str, tell: Callable[[str], None]
) -> None:
    """`tell`: see `KnownStore.recognise`. A store in the data folder is this user's alone."""
    own = data_dir / "store"
    folder = StoreFolder.of(environment.get("MARLAAS_STORE_URL") or own.as_uri())
    if folder is None:
        return
    await recognised(folder, redis_url, list(parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny"))), tell)
    if folder.path == own:
        make_private(own)
