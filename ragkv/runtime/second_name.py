"""A second name for a package of `ragkv`: `fusion` at the root of a checkout is `ragkv.fusion`,
with the same modules.

Without this, Python would load each module once more for the second name, and its classes would be
other classes.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FIRST = "ragkv"  # `FIRST` is the package that all second names lead into.


class _SecondNames(MetaPathFinder, Loader):
    """Answers an import under a second name with the module that has the first."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{FIRST}.{spec.name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Python gave the module the spec of its second name; its own is put back."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


_finder = _SecondNames()


def give_second_name(name: str) -> None:
    """From now on, `name` and every module below it is the module of that name in `ragkv`."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.names.add(name)
    sys.modules[name] = importlib.import_module(f"{FIRST}.{name}")
