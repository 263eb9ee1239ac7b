"""Threads and resources, below everything else: knows no model, no prompt and no store."""

from . import openmp
from .closing import Closing
from .files import replace_file, sync
from .priority_pool import PriorityThreadPool

__all__ = ["Closing", "PriorityThreadPool", "openmp", "replace_file", "sync"]
