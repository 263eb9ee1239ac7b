"""Engines, made at first use and shared by all components that use the same model and settings.

LangChain copies and rebuilds its components often (its standard test suites do so tens of thousands of times). So a
constructor loads nothing, and each engine is made once in a process. With each engine the texts that components
ingested and the conversations are kept.
"""

import atexit
import hashlib
import logging
import threading
from dataclasses import replace
from pathlib import Path

from langchain_core.messages import BaseMessage

from ragkv.api.chat import ChatEngine
from ragkv.config import EngineConfig
from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.model.decode.token_text import TokenText

log = logging.getLogger(__name__)


class SharedEngine(ChatEngine):
    """One engine, its chats and its message histories."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.histories: dict[str, list[BaseMessage]] = {}  # by session id, if the engine has no directory
        self.name = str(getattr(engine.tokenizer, "name_or_path", "") or "model")
        self.tokens = TokenText(engine.tokenizer)
        self.closed = False  # by `close_engines`

    def encode_known(self, *, wait: bool) -> None:
        """Compute the KV of the known texts: before this returns, or in the background, which tokenizes them too."""
        if wait:
            self.catalogue.encode_ingested(wait=True)
        else:
            threading.Thread(target=self._encode_soon, name="ragkv-corpus", daemon=True).start()

    def _encode_soon(self) -> None:
        try:
            self.catalogue.encode_ingested(wait=False)
        except RagKVError as error:  # a text may be too long for the context; its prompt says so too
            log.warning("The corpus is not encoded in the background: %s", error)


_ATTRIBUTE = "_ragkv_langchain"
_lock = threading.Lock()  # guards both dictionaries; never held while a model loads
_engines: dict[tuple[str, EngineConfig], SharedEngine] = {}
_loading: dict[tuple[str, EngineConfig], threading.Lock] = {}  # one for each key, so that loads do not wait for others


def shared_engine(model: str, config: EngineConfig) -> SharedEngine:
    """The engine of `model` with `config`, loaded at the first call. Raises what `Engine.from_pretrained` raises."""
    key = (str(model), config)
    with _lock:
        if (found := _engines.get(key)) is not None:
            return found
        loading = _loading.setdefault(key, threading.Lock())
    with loading:
        with _lock:
            if (found := _engines.get(key)) is not None:
                return found
        made = SharedEngine(Engine.from_pretrained(model, config))
        with _lock:
            _engines[key] = made
        return made


def shared_engine_of(engine: Engine) -> SharedEngine:
    """The shared state of an engine that the application made."""
    with _lock:
        found: SharedEngine | None = getattr(engine, _ATTRIBUTE, None)
        if found is None:
            found = SharedEngine(engine)
            setattr(engine, _ATTRIBUTE, found)  # an attribute, so that it lives exactly as long as the engine
        return found


def config_for(config: EngineConfig, model: str) -> EngineConfig:
    """`config` for another model. A store directory has one writer, so this model gets a directory inside it."""
    if config.store.directory is None:
        return config
    name = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    directory = str(Path(config.store.directory) / "models" / name)
    return replace(config, store=replace(config.store, directory=directory))


def close_engines() -> None:
    """Close every engine that this module made. The next call makes it anew."""
    with _lock:
        made = list(_engines.values())
        _engines.clear()
    for shared in made:
        shared.closed = True
        shared.engine.close()


atexit.register(close_engines)
