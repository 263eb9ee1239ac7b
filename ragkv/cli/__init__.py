"""The command line: `ragkv ingest | ask | chat | search | docs | serve | keys | gc | ...`.

Results go to standard output (text, or JSON with `--json`), progress and notes to standard error.
An error is one sentence and exit code 1; wrong usage is exit code 2. Commands import heavy modules
only when they run.
"""

import logging
import os
import sys

from ragkv.errors import RagKVError


def main() -> None:
    """Run the command line. The package's own errors are printed without a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    from .output import INTERRUPTED, print_error

    try:
        from .app import app

        app(prog_name="ragkv")
    except RagKVError as error:
        print_error(error)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output ended, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the interpreter flushes it at exit
        sys.exit(0)
    # typer turns an interrupted command into the exit status 130
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


__all__ = ["main"]
