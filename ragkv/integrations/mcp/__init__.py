"""The ingested documents as tools of the Model Context Protocol: over standard streams, or mounted in the REST service.

`ragkv mcp` serves a home over standard streams; `ragkv serve --mcp` mounts the same tools at `/mcp` (docs/mcp.md). This
package does not know which of the two calls it. Only it imports `mcp` (`pip install "ragkv[mcp]"`).
"""

from ragkv.errors import MissingExtraError

try:
    import mcp  # noqa: F401 - an optional dependency
except ImportError as error:
    raise MissingExtraError("mcp", "mcp", "The Model Context Protocol") from error

from .corpus import HomeCorpus
from .mounting import mount
from .tools import build_server

__all__ = ["HomeCorpus", "build_server", "mount"]
