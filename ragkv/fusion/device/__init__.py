"""Fusing on a GPU, next to the path for CPUs (docs/research/gpu.md)."""
