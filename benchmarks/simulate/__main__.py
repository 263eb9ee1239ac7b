"""`python -m benchmarks.simulate`: traces replayed through eviction policies
(docs/research/policies.md).
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragkv.errors import RagKVError

from . import ALL_POLICIES
from .command import run

COMPARED = "lru,t-lru,t-lru-guarded,tail-belady"


def simulate(
    trace: Annotated[
        str,
        typer.Option(
            help="A file: CSV, or as published; birth-death or sharegpt-like: docs/research/policies.md."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas, of: {', '.join(sorted(ALL_POLICIES))}.",
            show_default=COMPARED.replace(",", ", "),
        ),
    ] = COMPARED,
    capacity_blocks: Annotated[int | None, typer.Option(help="Capacity in blocks.")] = None,
    capacity_share: Annotated[
        float | None, typer.Option(help="Capacity as a share of the peak live blocks.")
    ] = None,
    xi: Annotated[
        str | None, typer.Option(help="Threshold: tokens (2000), or a TTFT target (200ms).")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="profile.json of a store: its prefill gives all times.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    slo_ms: Annotated[float, typer.Option(help="TTFT limit of a request.")] = 200.0,
    forced: Annotated[
        bool, typer.Option("--forced", help="Forced caching: never evict what was just served.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a trace through eviction policies and compare hits, TTFT and TEL."""
    options = dict(locals())
    run(options.pop("trace"), options.pop("policy"), **options, console=Console(soft_wrap=True))


if __name__ == "__main__":
    try:
        typer.run(simulate)
    except RagKVError as error:
        sys.exit(f"error: {error}")
