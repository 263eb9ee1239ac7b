"""A base class for resources that are closed when their `with` block ends. Pure Python."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A resource: use it as a context manager, or close it."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource. Twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
