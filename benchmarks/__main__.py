"""`python -m benchmarks [--quick]` runs every benchmark, one after the other."""

import runpy
import sys
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in ("__init__", "__main__", "report") and "def main()" in path.read_text():
        print(f"\n== {path.stem}")
        sys.argv = [str(path), *sys.argv[1:]]
        try:
            runpy.run_module(f"benchmarks.{path.stem}", run_name="__main__")
        except SystemExit as ended:  # its arguments name data, or servers, that only the caller has
            if ended.code:
                print(f"not run: python -m benchmarks.{path.stem} --help says what it needs")
