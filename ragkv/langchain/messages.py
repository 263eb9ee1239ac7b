"""LangChain's messages to turns of text, with the documents they carry.

Documents come as content blocks, as artifacts of tool messages, or with the call. A block's text stands where the
block stands; a document whose text is nowhere in the messages is put before what the last user turn says. Either way
the text is recognised afterwards like any other known text, so there is one path. What is not text is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, SystemMessage, ToolMessage

from ragkv.dialogue import DialogueDocument, DialogueRequest, Turn, insert_documents
from ragkv.errors import InputError, UnsupportedError

_PASSED_OVER = ("reasoning", "thinking", "tool_call", "tool_use", "invalid_tool_call", "non_standard")


def request(messages: Sequence[BaseMessage], documents: Iterable[Any], separator: str) -> DialogueRequest:
    """Turns and documents; `separator` stands behind a document that a block or the call gives."""
    turns: list[Turn] = []
    found: list[DialogueDocument] = []
    for message in messages:
        text, carried = _content(message, separator)
        found += carried
        if text or not isinstance(message, AIMessage):  # an answer that only calls tools says nothing
            turns.append(Turn(_role(message), text))
    asked = [given(item) for item in documents]
    return DialogueRequest(insert_documents(turns, asked, separator), (*found, *asked))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        roles = {"human": "user", "ai": "assistant"}
        return roles.get(message.role, message.role)
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, AIMessage):
        return "assistant"
    return "user"  # people, and tools, whose results are what the user's side brings


def _content(message: BaseMessage, separator: str) -> tuple[str, list[DialogueDocument]]:
    blocks: list[Any] = [message.content] if isinstance(message.content, str) else message.content
    parts: list[str] = []
    documents: list[DialogueDocument] = []
    for number, block in enumerate(blocks):
        found = _block(block)
        if isinstance(found, DialogueDocument):
            documents.append(found)
            parts.append(found.text + (separator if number + 1 < len(blocks) else ""))
        else:
            parts.append(found)
    text = "".join(parts)
    if isinstance(message, ToolMessage):
        carried = [given(item) for item in _items(message.artifact)]
        missing = [one for one in carried if one.text not in text]
        text = "".join(one.text + separator for one in missing) + text
        documents += carried
    return text, documents


def _block(block: Any) -> str | DialogueDocument:
    """The text of a content block, or the document it is."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text" and "metadata" not in block:
        return str(block.get("text", ""))
    if kind in ("text", "text-plain", "document") and (text := _text_of(block)) is not None:
        named = {name: block[name] for name in ("id", "title", "context") if block.get(name)}
        return DialogueDocument(text, {**named, **(block.get("metadata") or {})})
    if kind in _PASSED_OVER:
        return ""
    raise UnsupportedError(f"A message holds a block of type {kind!r}; this model reads text alone. Leave it out.")


def _text_of(block: Mapping[str, Any]) -> str | None:
    """The text of a document block in LangChain's form or, with a `source`, in Anthropic's."""
    source = block.get("source")
    text = source.get("data") if isinstance(source, Mapping) and source.get("type") == "text" else block.get("text")
    return text if isinstance(text, str) else None


def _items(artifact: Any) -> list[Any]:
    """The documents among what a tool left for us."""
    items = artifact if isinstance(artifact, list | tuple) else [artifact]
    return [item for item in items if isinstance(item, Document)]


def given(item: Any) -> DialogueDocument:
    """A document as people give it: a `Document`, a text, or `{"text": ..., "title": ...}`."""
    if isinstance(item, Document):
        named = {"id": item.id} if item.id else {}
        return DialogueDocument(item.page_content, {**named, **item.metadata})
    if isinstance(item, str):
        return DialogueDocument(item, {})
    if isinstance(item, Mapping):
        for name in ("text", "page_content", "content"):
            if isinstance(item.get(name), str):
                others = {key: value for key, value in item.items() if key not in (name, "metadata")}
                return DialogueDocument(item[name], {**others, **(item.get("metadata") or {})})
    raise InputError(f"A document is a Document, a text or a mapping with 'text', not {item!r:.80}.")
