"""Engines, made at first use and shared by all components that use the same model and settings.

LangChain copies and rebuilds its components often (its standard test suites do so tens of thousands
of times). So a constructor loads nothing, and each engine is made once in a process. An engine also
keeps its conversations, and the texts that components ingested.
"""

import atexit
import logging
import threading
from pathlib import Path

from langchain_core.messages import BaseMessage

from ragkv.chat import ChatEngine
from ragkv.config import EngineConfig
from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.home import KnownHome, model_or_default
from ragkv.model.decode.token_text import TokenText
from ragkv.runtime import begun

log = logging.getLogger(__name__)


class SharedEngine(ChatEngine):
    """One engine, its chats and its message histories."""

    def __init__(self, engine: Engine, name: str = "") -> None:
        super().__init__(engine)
        # by session id, if the engine has no directory
        self.histories: dict[str, list[BaseMessage]] = {}
        self.name = name or str(getattr(engine.tokenizer, "name_or_path", "") or "model")
        self.tokens = TokenText(engine.tokenizer)
        self.closed = False  # by `close_engines`

    def encode_known(self) -> None:
        """Tokenize the known texts and compute their KV in the background."""
        begun(
            self._encode_known, "ragkv-corpus", "what has no stored KV is computed when it is asked"
        )

    def _encode_known(self) -> None:
        try:
            self.catalogue.encode_ingested()
        # a text may be too long for the context; its prompt says so too
        except RagKVError as error:
            log.warning("The corpus is not encoded in the background: %s", error)


_ATTRIBUTE = "_ragkv_langchain"
# guards the dictionary, also while a model loads: threads that need it load it once
_lock = threading.RLock()
_engines: dict[tuple[str, EngineConfig], SharedEngine] = {}


def shared_engine(model: str, config: EngineConfig) -> SharedEngine:
    """The engine of `model` with `config`, loaded at the first call. Raises what
    `Engine.from_pretrained` raises.

    Where `config` stores in a home, the home's model and what else it keeps are the defaults.
    """
    if config.store.directory is not None:
        home = KnownHome.at(Path(config.store.directory).parent, model)
        model = home.model
        config = home.settings_over(config)
    key = (model_or_default(model), config)
    with _lock:
        if key not in _engines:
            _engines[key] = SharedEngine(Engine.from_pretrained(*key), key[0])
        return _engines[key]


def shared_engine_of(engine: Engine) -> SharedEngine:
    """The shared state of an engine that the application made."""
    with _lock:
        found: SharedEngine | None = getattr(engine, _ATTRIBUTE, None)
        if found is None:
            found = SharedEngine(engine)
            # an attribute, so that it lives exactly as long as the engine
            setattr(engine, _ATTRIBUTE, found)
        return found


def close_engines() -> None:
    """Close every engine that this module made. The next call makes it anew."""
    with _lock:
        made = list(_engines.values())
        _engines.clear()
    for shared in made:
        shared.closed = True
        shared.engine.close()


atexit.register(close_engines)
