"""What the commands share: where an application's files lie, and building its engine and corpus from options."""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import EngineConfig

from .output import errors

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.rag import Rag


@dataclasses.dataclass(frozen=True, slots=True)
class Workplace:
    """The options every command takes."""

    home: Path
    model: str
    settings: Path | None
    device: str | None
    dtype: str | None
    exact_history: bool = False  # of conversations, whatever their last turn reused

    def config(self) -> EngineConfig:
        """Settings from the TOML file if one is given, else from the environment; the options win."""
        from ragkv.rag import DOCUMENT_END

        config = EngineConfig.from_toml(self.settings) if self.settings else EngineConfig.from_env()
        changes: dict[str, object] = {}
        if config.store.directory is None:
            changes["store"] = dataclasses.replace(config.store, directory=str(self.home / "kv"))
        if self.model != "reader" and not config.prompt.chunk_end:
            changes["prompt"] = dataclasses.replace(config.prompt, chunk_end=DOCUMENT_END)
        if self.exact_history:
            changes["session"] = dataclasses.replace(config.session, inexact_history="recompute")
        if self.device:
            changes["device"] = self.device
        if self.dtype:
            changes["dtype"] = self.dtype
        return dataclasses.replace(config, **changes)  # type: ignore[arg-type]

    @contextmanager
    def engine(self) -> Iterator["Engine"]:
        """The engine, closed at the end."""
        from transformers.utils import logging as transformers_logging

        from ragkv.engine import Engine

        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with Engine.from_pretrained(self.model, self.config()) as engine:
            yield engine

    @contextmanager
    def rag(self, chunk_tokens: int | None = None) -> Iterator["Rag"]:
        """The corpus on its engine; says once on standard error what keeps retrieval from its best."""
        from ragkv.rag import Rag, default_chunk_tokens
        from ragkv.retrieval import resolve_embedder

        with self.engine() as engine:
            embedder = resolve_embedder(device=self.device or "cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # third parties' own, not the user's to mend
                tokens = chunk_tokens or default_chunk_tokens(engine)
                with Rag(engine, self.home / "index", chunk_tokens=tokens, embedder=embedder) as rag:
                    yield rag


def notice(text: str) -> None:
    """Something the user should know, on standard error."""
    errors.print(f"note: {text}", style="yellow")
