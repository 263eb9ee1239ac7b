"""Engines, made when they are first needed and shared by everybody who asks for the same model and settings.

LangChain copies and rebuilds its components freely (its standard suites do so tens of thousands of times), so a
constructor loads nothing; what is heavy lives here, once a process. Beside each engine stands what the components
learn about it: the texts it has ingested and the conversations it has led.
"""

import atexit
import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.config import EngineConfig
from ragkv.dialogue import DialogueEngine
from ragkv.engine import Engine


class Shared(DialogueEngine):
    """One engine and what belongs to it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.histories: dict[str, list[Any]] = {}  # messages by session id, where there is no directory
        self.name = str(getattr(engine.tokenizer, "name_or_path", "") or "model")
        self.closed = False  # by `close_engines`


_ATTRIBUTE = "_ragkv_langchain"
_lock = threading.Lock()  # of the books; held shortly
_shared: dict[tuple[str, EngineConfig], Shared] = {}
_making: dict[tuple[str, EngineConfig], threading.Lock] = {}  # so that a slow load blocks nobody else


def shared(model: str, config: EngineConfig) -> Shared:
    """The engine of `model` under `config`; loads it the first time. Raises what `Engine.from_pretrained` raises."""
    key = (str(model), config)
    with _lock:
        if (found := _shared.get(key)) is not None:
            return found
        making = _making.setdefault(key, threading.Lock())
    with making:
        with _lock:
            if (found := _shared.get(key)) is not None:
                return found
        made = Shared(Engine.from_pretrained(model, config))
        with _lock:
            _shared[key] = made
        return made


def around(engine: Engine) -> Shared:
    """What belongs to an engine somebody else made."""
    with _lock:
        found: Shared | None = getattr(engine, _ATTRIBUTE, None)
        if found is None:
            found = Shared(engine)
            setattr(
                engine, _ATTRIBUTE, found
            )  # so that it lives as long as the engine: nothing else knows when that ends
        return found


def other_model(config: EngineConfig, model: str) -> EngineConfig:
    """The settings for another model: a store directory has one writer, so this one gets a place inside."""
    if config.store.directory is None:
        return config
    name = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    place = str(Path(config.store.directory) / "models" / name)
    return replace(config, store=replace(config.store, directory=place))


def close_engines() -> None:
    """Close every engine made here; the next call makes it anew."""
    with _lock:
        made = list(_shared.values())
        _shared.clear()
    for one in made:
        one.closed = True
        one.engine.close()


atexit.register(close_engines)
