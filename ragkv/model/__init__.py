"""What a transformer is to us: adapters, rotary tables, row attention, a prompt's layout and its KV, decoding."""

from .adapter import Adapter
from .attention import Watch
from .probe import adapt, full_pass
from .promptkv import PromptKV, Recording, Rows
from .rope import Rope, RotaryTables

__all__ = ["Adapter", "PromptKV", "Recording", "Rope", "RotaryTables", "Rows", "Watch", "adapt", "full_pass"]
