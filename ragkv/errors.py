"""All errors, in one tree. A message says what happened, the values, and what to do. A cache miss
is no error.
"""

from typing import Any, Self


class RagKVError(Exception):
    """Root of every error ragkv raises on purpose."""


class ConfigError(RagKVError):
    """A setting is unknown, of the wrong type or out of range."""


class ProfileError(RagKVError):
    """There is no profile of this model on this machine, or it cannot be read."""


class InputError(RagKVError):
    """A call's arguments cannot be served."""


class PromptTooLongError(InputError):
    """The prompt and the answer asked for do not fit the model's context."""


class SchemaError(InputError):
    """Answers cannot be constrained to this JSON schema."""

    param = "response_format"  # the argument that has the schema

    def __init__(self, pointer: str, reason: str) -> None:
        where = f"the schema at {pointer}" if pointer else "the schema"
        super().__init__(f"Answers cannot be constrained to {where}: {reason}.")
        # JSON pointer of the part; "" for the whole schema
        self.pointer = pointer
        self.reason = reason


class UnsupportedError(InputError, NotImplementedError):
    """ragkv does not offer this; the message says why."""


class ModelError(RagKVError):
    """Something about the model."""


class ModelNotFoundError(ModelError):
    """Nothing loadable at that path or id."""


class UnsupportedModelError(ModelError):
    """This model cannot be fused exactly; the message says why."""


class StoreError(RagKVError):
    """Something about the store."""


class StoreLockedError(StoreError):
    """Another process writes to this directory."""

    def __init__(self, message: str, holder: str = "another process") -> None:
        super().__init__(message)
        self.holder = holder  # the process that writes, in words


class StoreReadOnlyError(StoreError):
    """A write was asked of a store that was opened read-only."""


class EntryDamagedError(StoreError):
    """Stored bytes do not match their identity or checksum. The engine turns it into a
    cache miss.
    """

    def __init__(self, key: Any, why: str) -> None:
        """`key` is the entry's `EntryKey`, which this floor does not know."""
        super().__init__(
            f"Entry {key} is damaged: {why}. It was dropped and counts as a cache miss."
        )
        self.key = key


class RemoteError(StoreError):
    """Shared storage failed or did not answer. The engine turns it into a cache miss."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out  # no answer came in time


class EntryUnreachableError(EntryDamagedError):
    """An entry could not be read to its end. The engine turns it into a cache miss, as if it were
    damaged.
    """

    def __init__(self, key: Any, why: str) -> None:
        StoreError.__init__(
            self, f"Entry {key} could not be read: {why}. It counts as a cache miss."
        )
        self.key = key


class SessionConflictError(RagKVError):
    """Another replica continued the conversation meanwhile; this turn is not part of it."""


class SessionUnavailableError(RagKVError):
    """The conversation's state could not be read or written; what is kept of it was left alone."""


class QueueError(RagKVError):
    """The request is valid but was not served."""


class QueueFullError(QueueError):
    """Too many requests wait already."""


class DeadlineError(QueueError):
    """The request's deadline passed."""


class CancelledError(QueueError):
    """The request's caller cancelled it."""


class AnswerServerError(QueueError):
    """The server that computes the answers does not answer, or is not the one that is expected."""


class DocumentError(RagKVError):
    """A document cannot be read."""


class DocumentLimitError(DocumentError):
    """A document holds more than a limit allows."""

    def __init__(self, problem: str, limit: str) -> None:
        super().__init__(f"{problem}. Split it, or raise the limit.")
        self.problem = problem
        self.limit = limit

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        return type(self), (self.problem, self.limit)  # it comes out of another process


class MissingExtraError(RagKVError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs the package {package}: pip install "ragkv[{extra}]"')
        self._given = (package, extra, purpose)

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        return type(self), self._given  # it comes out of another process
