"""Turns chat messages into prompts for the engine.

    chat = ChatEngine(engine)
    prompt = chat.build_prompt(ChatInput(messages, documents))
    events = engine.stream(prompt.question, prompt.pieces, separator="", ...)
    for event in chat.follow(prompt, events): ...

The model's chat template renders the messages. Known chunk texts are found in the rendered text.
Messages that continue an earlier conversation find its session. This package knows no protocol: the
LangChain and REST front ends convert their messages.
"""

from .catalogue import ChatDocument
from .chat_engine import ChatAnswer, ChatEngine, ChatInput, ChatPrompt, insert_documents
from .chat_template import PlainMessage
from .passage_matcher import PassageMatcher
from .tools import FoundCalls, Tool, ToolCall, required_form

__all__ = [
    "ChatAnswer",
    "ChatDocument",
    "ChatEngine",
    "ChatPrompt",
    "ChatInput",
    "FoundCalls",
    "PassageMatcher",
    "Tool",
    "ToolCall",
    "PlainMessage",
    "insert_documents",
    "required_form",
]
