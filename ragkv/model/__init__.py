"""Models: adapters that run layers over chosen rows, rotary tables, row attention, prompt KV,
decoding.
"""

from .adapter import Adapter
from .attention import Watch
from .layer_views import run_layer
from .probe import adapt, full_pass, grown
from .promptkv import KVShape, PromptKV
from .recording import Recording
from .rope import Rope, RotaryTables
from .rows import LayerPass, Rows, sent
from .token_runs import PASS_ROWS, Context, TokenRun, raw_kv

__all__ = [
    "PASS_ROWS",
    "Adapter",
    "Context",
    "KVShape",
    "LayerPass",
    "PromptKV",
    "Recording",
    "Rope",
    "RotaryTables",
    "Rows",
    "TokenRun",
    "Watch",
    "adapt",
    "full_pass",
    "grown",
    "raw_kv",
    "run_layer",
    "sent",
]
