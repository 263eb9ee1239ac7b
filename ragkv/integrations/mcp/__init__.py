"""The ingested documents as tools of the Model Context Protocol: over standard streams, or mounted
in the REST service.

`ragkv mcp` offers a home over standard streams, by way of the server that has it; `ragkv serve
--mcp` mounts the same tools at `/mcp` (docs/clients.md). This package does not know which of the
two calls it. Only it imports `mcp` (`pip install "ragkv[mcp]"`).
"""

from ragkv.errors import MissingExtraError

try:
    import mcp  # noqa: F401 - an optional dependency
except ImportError as error:
    raise MissingExtraError("mcp", "mcp", "The Model Context Protocol") from error

from .corpus import ServedCorpus
from .mounting import mount
from .tools import build_server

__all__ = ["ServedCorpus", "build_server", "mount"]
