"""Chat messages, as plain turns of text, become prompts for the engine.

    dialogue = DialogueEngine(engine)
    prompt = dialogue.build_prompt(DialogueRequest(turns, documents))
    engine.stream(prompt.question, prompt.chunks, ...)

The model's chat template renders the turns. Known chunk texts are found in the rendered text. A list of turns that
continues an earlier list finds its session. This package knows no protocol: the LangChain and REST front ends convert
their messages to turns.
"""

from .catalogue import DialogueDocument
from .dialogue_engine import DialogueEngine, DialoguePrompt, DialogueRequest, insert_documents
from .passage_matcher import PassageMatcher, key_of
from .template import Turn
from .tools import CallFilter, Tool, ToolCall, find_calls, required_form

__all__ = [
    "CallFilter",
    "DialogueDocument",
    "DialogueEngine",
    "DialoguePrompt",
    "DialogueRequest",
    "PassageMatcher",
    "Tool",
    "ToolCall",
    "Turn",
    "find_calls",
    "insert_documents",
    "key_of",
    "required_form",
]
