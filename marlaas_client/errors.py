"""The errors of the client.

ClientError
├── InvalidInput   what was given is wrong; the message says what to do
├── Refused        the API answered with an error; the message is its own
├── Unavailable    nothing answers
└── JobFailed      a job that was waited for failed; the message says which and why
"""


class ClientError(Exception):
    """Root of all errors raised on purpose."""


class InvalidInput(ClientError):
    """A wrong input. The message says what to do."""


class Refused(ClientError):
    """The API answered with an error; the message is its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(ClientError):
    """Nothing answers."""


class JobFailed(ClientError):
    """A job that was waited for failed; the message says which and why."""
