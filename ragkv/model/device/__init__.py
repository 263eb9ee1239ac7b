"""The code that runs on a GPU only, next to the path for CPUs (docs/research/gpu.md)."""
