"""Options that many commands take."""

from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[Path, typer.Option(envvar="RAGKV_HOME", help="Where index and KV of this corpus lie.")]
Model = Annotated[str, typer.Option(envvar="RAGKV_MODEL", help="'reader' (bundled), a model folder or a hub id.")]
Settings = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
HOME = Path(".ragkv")
