"""The door of the dialogue room: what was said, as text, becomes what the engine is asked.

    dialogues = Dialogues(engine)
    asked = lay_out(dialogues, Request(turns, documents), converse=True)
    engine.stream(asked.question, asked.chunks, ...)

Turns are rendered as the model's chat template writes them, known chunk texts are found in that text, and a list of
turns that goes on from an earlier one finds its session. It knows no protocol: LangChain's messages and REST's are made
turns elsewhere.
"""

from .catalogue import Catalogue, Given
from .conversations import Conversation, Conversations
from .dialogues import Dialogues
from .prompting import Asked, Request, file_answer, lay_out, placed
from .recognition import Found, Texts
from .template import Template, Turn

__all__ = [
    "Asked",
    "Catalogue",
    "Conversation",
    "Conversations",
    "Dialogues",
    "Found",
    "Given",
    "Request",
    "Template",
    "Texts",
    "Turn",
    "file_answer",
    "lay_out",
    "placed",
]
