"""Declares environments."""


class Environment:
    SUPPORTS_CONCURRENT_SESSIONS: bool = False

    def close(self) -> None:
        return None
