"""The options that many commands take, and the engine and corpus that they describe."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.config import EngineConfig
from ragkv.errors import InputError
from ragkv.runtime.setting_values import FILE_VARIABLE, toml_values

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.rag import Rag

FILE = Path("ragkv.toml")  # the settings file of commands that run in its folder


def file_defaults(file: Path | None) -> dict[str, str]:
    """The options that a settings file gives a default: the home and the model."""
    values = toml_values(file) if file is not None else {}
    return {name: values[name] for name in ("home", "model") if name in values}


def settings_file() -> Path | None:
    """The settings file of a command without `--config`."""
    named = os.environ.get(FILE_VARIABLE)
    return Path(named) if named else FILE if FILE.is_file() else None


def _use_file(context: typer.Context, file: Path | None) -> Path | None:
    """The settings file, whose defaults the command's other options take."""
    if file is None:
        return settings_file()
    context.default_map = file_defaults(file)
    return file


Home = Annotated[Path, typer.Option(envvar="RAGKV_HOME", help="Folder of this corpus's index and KV.")]
Model = Annotated[str, typer.Option(envvar="RAGKV_MODEL", help="'reader' (bundled), a model folder or a hub id.")]
Settings = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_use_file,
        help=f"TOML file of settings; else the one in {FILE_VARIABLE}, else {FILE} if it is here.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")]
Passages = Annotated[int, typer.Option("--k", "-k", min=1, help="Passages to retrieve.")]
Retriever = Annotated[str | None, typer.Option(help="bm25, dense or fused.")]
SelectorName = Annotated[str | None, typer.Option(help="Which tokens are recomputed [default: from the settings]")]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
HOME = Path(".ragkv")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options from which a command builds its engine and corpus."""

    home: Path
    model: str
    settings: Path | None = None
    device: str | None = None
    dtype: str | None = None
    exact_history: bool = False  # recompute history that was reused inexactly

    def config(self) -> EngineConfig:
        """The settings of the TOML file, overridden by the environment, overridden by these options."""
        from ragkv.rag import DOCUMENT_END

        config = EngineConfig.gather(self.settings)
        store, prompt, session = config.store, config.prompt, config.session
        if store.directory is None:
            store = replace(store, directory=str(self.home / "kv"))
        if self.model != "reader" and not prompt.chunk_end:
            prompt = replace(prompt, chunk_end=DOCUMENT_END)
        if self.exact_history:
            session = replace(session, inexact_history="recompute")
        device, dtype = self.device or config.device, self.dtype or config.dtype
        return replace(config, store=store, prompt=prompt, session=session, device=device, dtype=dtype)

    @contextmanager
    def engine(self) -> Iterator["Engine"]:
        """The engine; closed at the end."""
        from ragkv.engine import Engine
        from ragkv.model.loading import quiet_transformers

        quiet_transformers()
        with Engine.from_pretrained(self.model, self.config()) as engine:
            yield engine

    @contextmanager
    def rag(self, chunk_tokens: int | None = None) -> Iterator["Rag"]:
        """The corpus on its engine; both closed at the end."""
        from ragkv.rag import Rag, default_chunk_tokens
        from ragkv.retrieval import resolve_embedder

        with self.engine() as engine:
            embedder = resolve_embedder(device=self.device or "cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # from other packages; the user cannot fix them
                tokens = chunk_tokens or default_chunk_tokens(engine)
                with Rag(engine, self.home / "index", chunk_tokens=tokens, embedder=embedder) as rag:
                    yield rag


def require_index(home: Path) -> None:
    """Raise `InputError` if nothing was ingested at `home`."""
    if not (home / "index").is_dir():
        raise InputError(f"Nothing was ingested at {home}: run `ragkv ingest PATH --home {home}` first.")
