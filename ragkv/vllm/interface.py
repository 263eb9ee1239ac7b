"""`interface.txt` lists all of vLLM's interface that the connector uses. At start it is compared
with the installed vLLM. An upgrade begins there (docs/research/vllm.md).
"""

import importlib
from collections.abc import Iterator
from importlib.resources import files

from ragkv.errors import ConfigError

TESTED = ("0.32.0",)  # the versions with which the tests passed


def check_interface(listed: str | None = None) -> None:
    """Raise `ConfigError` if the installed vLLM lacks something of what is `listed`, by default in
    the file.
    """
    if missing := tuple(
        _missing(listed or files(__package__).joinpath("interface.txt").read_text())
    ):
        version = getattr(importlib.import_module("vllm"), "__version__", "of an unknown version")
        raise ConfigError(
            f"vLLM {version} has no {', '.join(missing)}, which RagKVConnector uses; it was "
            "tested with "
            f"{', '.join(TESTED)} (docs/vllm.md)."
        )


def _missing(listed: str) -> Iterator[str]:
    """Lines with a module and a name in it, and behind each the attributes of the objects of that
    name.
    """
    known: set[str] | None = None  # None: what has the attributes is missing itself
    for word in listed.split():
        module, found, name = word.partition(":")
        if not found:
            if known is not None and word not in known:
                yield word
            continue
        try:
            used = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            known = None
            yield word
            continue
        made = getattr(used.__init__, "__code__", None)  # attributes that it sets count
        known = {
            *dir(used),
            *getattr(used, "__dataclass_fields__", ()),
            *(made.co_names if made else ()),
        }
