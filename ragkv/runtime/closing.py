"""A base class for resources that are closed when their `with` block ends. Pure Python."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A resource: use it as a context manager, or close it."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource. Twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
