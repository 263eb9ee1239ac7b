"""What a transformer is to us: adapters, rotary tables, row attention, a prompt's layout and its KV, decoding."""

from .adapter import Adapter
from .attention import Watch
from .probe import adapt, full_pass
from .promptkv import KVShape, PromptKV, Recording
from .rope import Rope, RotaryTables
from .rows import Rows

__all__ = ["Adapter", "KVShape", "PromptKV", "Recording", "Rope", "RotaryTables", "Rows", "Watch", "adapt", "full_pass"]
