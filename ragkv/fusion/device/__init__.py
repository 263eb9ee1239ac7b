"""Fusing on a device, beside the path that CPUs take (docs/research/gpu.md)."""
