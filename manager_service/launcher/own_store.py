"""Waits, for `marlaas up`, until the folder of the local store is the one that the cells know."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import MarlaasError
from common.peers.base_fetch import folder_of
from common.settings import Settings, parse_base_models, stored_digest
from common.store.known_store import recognised
from common.store.store_folder import StoreFolder
from manager_service.launcher.embedded_redis import make_private


class OwnStore:
    """The folder of the local store. Services that start use it once it is the cells'."""

    def __init__(self, environment: Mapping[str, str], data_dir: Path, tell: Callable[[str], None]) -> None:
        """`tell` hears what is waited for, and what to do."""
        self._environment = environment
        self._own = data_dir / "store"
        self._tell = tell
        self.waits_for = ""
        """The reason why the folder is not used yet."""

    async def recognise(self, redis_url: str) -> None:
        """Returns once it may be used. A store in the data folder is then only this user's."""
        folder = StoreFolder.of(self._environment.get("MARLAAS_STORE_URL") or self._own.as_uri())
        if folder is None:
            return
        bases = list(parse_base_models(self._environment.get("MARLAAS_BASE_MODELS", "tiny")))
        await recognised(folder, redis_url, bases, self._wait)
        self.waits_for = ""
        if folder.path == self._own:
            make_private(self._own)

    def with_bases_here(self) -> dict[str, str]:
        """The environment, naming folders with the texts of the store's base models. Errors are left to the services."""
        environment = dict(self._environment)
        with contextlib.suppress(MarlaasError, ValueError):
            settings = Settings(
                data_dir=self._own.parent,
                store_url=environment.get("MARLAAS_STORE_URL", ""),
                cache_dir=Path(cache) if (cache := environment.get("MARLAAS_CACHE_DIR")) else None,
            )
            bases = parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny"))
            for name, where in bases.items():
                if stored_digest(where):
                    bases[name] = str(folder_of(where, settings, with_weights=False))
            environment["MARLAAS_BASE_MODELS"] = ",".join(f"{name}={where}" for name, where in bases.items())
        return environment

    def _wait(self, reason: str) -> None:
        self.waits_for = reason
        self._tell(f"waiting for the store: {reason}")
