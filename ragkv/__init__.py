"""ragkv: a RAG application framework with cached knowledge fusion.

Importing it is light: torch and transformers load when an engine is built.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import (
    EngineConfig,
    FusionConfig,
    KCacheConfig,
    PromptConfig,
    SessionConfig,
    StoreConfig,
)
from .errors import RagKVError
from .types import Answer, Chunk, Citation, PromptSpan, Reuse, Text, Timing, TokenEvent

if TYPE_CHECKING:
    from .engine import Engine
    from .prompt.constraints import ResponseFormat
    from .rag import Corpus, Rag
    from .sessions import Session

__version__ = "0.1.0"

_LAZY = {
    "Corpus": ".rag",
    "Engine": ".engine",
    "Rag": ".rag",
    "ResponseFormat": ".prompt.constraints",
    "Session": ".sessions",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Answer",
    "Chunk",
    "Citation",
    "Corpus",
    "Engine",
    "EngineConfig",
    "FusionConfig",
    "KCacheConfig",
    "PromptConfig",
    "PromptSpan",
    "Rag",
    "RagKVError",
    "ResponseFormat",
    "Reuse",
    "Session",
    "SessionConfig",
    "StoreConfig",
    "Text",
    "Timing",
    "TokenEvent",
    "__version__",
]
