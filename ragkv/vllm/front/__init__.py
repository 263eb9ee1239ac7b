"""Answers that a vLLM server computes, with ragkv's connector in it (docs/vllm.md).

The engine tokenizes, lays prompts out and keeps documents, their KV and conversations.
`VllmBackend` sends a prompt's token ids to the server and gives its tokens back as the engine's
events. `prompt_report.py` defines how the connector reports on a prompt.
"""

from .backend import VllmBackend
from .prompt_report import (
    cached_report,
    connector_answer,
    differences,
    fused_report,
    left_report,
)
from .vllm_server import VllmServer

__all__ = [
    "VllmBackend",
    "VllmServer",
    "cached_report",
    "connector_answer",
    "differences",
    "fused_report",
    "left_report",
]
