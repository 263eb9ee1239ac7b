"""One engine, and what its dialogues need beside it."""

from ragkv.engine import Engine

from .catalogue import Catalogue
from .conversations import Conversations
from .template import Template


class Dialogues:
    """What an engine's dialogues share: its template, the texts it knows as chunks, its conversations."""

    def __init__(self, engine: Engine) -> None:
        """Raises `InputError` for an engine without a tokenizer."""
        self.engine = engine
        self.template = Template(engine.tokenizer, engine.config.prompt.system)
        self.catalogue = Catalogue(engine)
        self.conversations = Conversations(engine)

    @property
    def separator(self) -> str:
        """What stands behind a document that is put into the prompt."""
        # The reader was taught documents end to end; each begins with its own space.
        return self.engine.config.prompt.chunk_end or (" " if self.engine.is_reader else "\n\n")

    def forget(self) -> None:
        """Forget what calls brought: their documents' texts, and the conversations nobody named."""
        self.catalogue.forget_given()
        self.conversations.clear()
