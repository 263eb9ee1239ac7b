"""A small trained model for tests whose answers must mean something: it reads `tests/world/`."""

from pathlib import Path

READER = str(Path(__file__).parent / "fixtures" / "reader")  # its folder, as `--model` takes it
