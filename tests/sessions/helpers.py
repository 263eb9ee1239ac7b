"""Helpers for tests of conversations: engines, turns, and a conversation that several engines
continue.
"""

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from ragkv import Engine, EngineConfig, Session, StoreConfig
from ragkv.config import SessionConfig
from ragkv.prompt import PrefilledPrompt
from ragkv.store.tiers import Tier
from tests import tiny_models
from tests.engine.helpers import close, full_prefill
from tests.fixed import fixed
from tests.store.entries import open_leases
from tests.store.fakes import store_of

BLOCK = 8  # tokens: a turn of the tests makes a block or two


def engine_at(
    directory: Path | None,
    family: str = "llama",
    session: dict[str, Any] | None = None,
    wrap: Callable[[Tier], Any] | None = None,
    **store: Any,
) -> Engine:
    """An engine whose conversations are in `directory`; `wrap` puts its tiers into others."""
    config = EngineConfig(
        store=StoreConfig(directory=None if directory is None else str(directory), **store),
        fusion=fixed(selector="first-k"),
        session=SessionConfig(**{"block_tokens": BLOCK, **(session or {})}),
    )
    wrapped = wrap and store_of(config.store, wrap, config.session.block_tokens)
    return Engine(tiny_models.model(family), config=config, store=wrapped)


def question(turn: int) -> list[int]:
    return tiny_models.tokens(5, seed=100 + turn)


def ask(engine: Engine, session: Session, turn: int, chunks: Any = (), **how: Any) -> Any:
    return engine.answer(question(turn), chunks, session, max_new_tokens=4, min_new_tokens=4, **how)


def talk(engine: Engine, session_id: str = "s", turns: int = 3) -> Session:
    """The conversation of that id, continued to `turns` turns."""
    session = engine.session(session_id)
    for turn in range(session.turns, turns):
        ask(engine, session, turn)
    return session


def is_full_prefill(
    engine: Engine, session: Session, turn: int, family: str = "llama", **how: Any
) -> PrefilledPrompt:
    """The next turn's prefill, after checking its logits against a full prefill of the whole
    conversation.
    """
    prefill = engine.prefill(question(turn), session=session, **how)
    ids = [1, *session.token_ids, *question(turn)]
    assert prefill.token_ids.tolist() == ids
    close(prefill.logits, full_prefill(ids, family)[0])
    return prefill


def carry_on(
    directory: Path, family: str, turns: int, restarts: Container[int]
) -> list[PrefilledPrompt]:
    """The prefills of a conversation of `turns` turns; the engine is reopened before the turns in
    `restarts`.
    """
    prefills = []
    engine = engine_at(directory, family)
    try:
        for turn in range(turns):
            if turn in restarts:
                engine.close()
                engine = engine_at(directory, family)
            session = engine.session("s")
            assert session.turns == turn
            prefills.append(is_full_prefill(engine, session, turn, family, ratio=1.0))
            ask(engine, session, turn, ratio=1.0)
    finally:
        engine.close()
    return prefills


def with_kv(session: Session) -> int:
    """How many tokens of the session's history have KV."""
    return sum(map(len, session.state.history.blocks))


def files(directory: Path) -> int:
    return len(list(directory.glob("entries/*/*.kv")))


def pinned(engine: Engine) -> int:
    """Open leases in all tiers, after a flush."""
    engine.flush()
    return open_leases(*engine.parts.store.tiers)
