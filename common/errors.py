"""The error tree. Foreign errors are translated into it where the foreign library is called."""

import os

REFUSED = os.EX_CONFIG
"""Exit status of a process with unusable settings: starting it again at once would not help."""


class MarlaasError(Exception):
    """Root of all errors raised on purpose."""


class Permanent(MarlaasError):
    """Will fail again in the same way: a value, a dead letter or a refusal."""


class InvalidInput(Permanent):
    """A user's input is wrong; the message says what to do. `param` names the offending field, if any."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(Permanent):
    """No such object, record or adapter."""

    def __init__(self, message: str, *, code: str = "not_found") -> None:
        super().__init__(message)
        self.code = code


class CorruptObject(Permanent):
    """Bytes do not match their sha256, or do not parse."""


class TrainingFailed(Permanent):
    """A step whose result must not be committed, for example a loss that is not a number."""


class Retryable(MarlaasError):
    """The same call may succeed later."""


class Unavailable(Retryable):
    """Redis, the object store or a worker is away, loading, or full."""


class StoreUnavailable(Unavailable):
    """The object store is away or full. All work needs it, so work waits without limit."""


class AlreadyExists(MarlaasError):
    """A create-only write lost: somebody else was first."""


class Fenced(MarlaasError):
    """This process no longer holds the lease under which it wanted to write."""
