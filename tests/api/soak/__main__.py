"""`python -m tests.api.soak`: exit status 0 if every check passed."""

import argparse
import signal
import sys
from pathlib import Path

from tests.api.attacks.front import NGINX

from .run import Plan, soak

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.api.soak")
    parser.add_argument("--minutes", type=float, default=60.0, help="under load [60]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/soak"), help="folder of the logs [runs/soak]"
    )
    parser.add_argument("--nginx", action=argparse.BooleanOptionalAction, default=NGINX is not None)
    given = parser.parse_args()
    # ends its servers, too
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(1 if soak(Plan(given.minutes, given.out, given.seed, given.nginx)) else 0)
