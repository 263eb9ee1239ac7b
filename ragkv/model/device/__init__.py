"""What runs on a GPU alone, beside the path that CPUs take (docs/gpu.md)."""
