"""Converts LangChain's messages to turns of text, with the documents they carry.

Documents come as content blocks, as artifacts of tool messages, or with the call. The text of a block replaces the
block. A document whose text is in no message is put before the text of the last user turn. In both cases the text is
recognised afterwards like any other known text, so there is one code path. Content that is not text is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, SystemMessage, ToolMessage

from ragkv.api.chat import DialogueDocument, DialogueRequest, Tool, Turn, insert_documents
from ragkv.errors import InputError, UnsupportedError

from .tools import dialogue_calls

_IGNORED_BLOCKS = ("reasoning", "thinking", "tool_call", "tool_use", "invalid_tool_call", "non_standard")


def dialogue_request(
    messages: Sequence[BaseMessage], documents: Iterable[Any], separator: str, tools: Sequence[Tool] = ()
) -> DialogueRequest:
    """The turns and documents of a call. `separator` follows each document that a block or the call gives."""
    turns: list[Turn] = []
    carried: list[DialogueDocument] = []
    for message in messages:
        text, found = _content(message, separator)
        carried += found
        if isinstance(message, ToolMessage):
            turns.append(Turn("tool", text, call_id=message.tool_call_id, name=message.name or ""))
        elif isinstance(message, AIMessage):
            turns.append(Turn("assistant", text, dialogue_calls(message.tool_calls)))
        else:
            turns.append(Turn(_role(message), text))
    of_call = [to_document(item) for item in documents]
    inserted = insert_documents(turns, of_call, separator)
    return DialogueRequest(inserted, (*carried, *of_call), tuple(tools))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        roles = {"human": "user", "ai": "assistant"}
        return roles.get(message.role, message.role)
    if isinstance(message, SystemMessage):
        return "system"
    return "user"


def _content(message: BaseMessage, separator: str) -> tuple[str, list[DialogueDocument]]:
    """The text of a message, and the documents in it."""
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
        carried = [to_document(item) for item in _artifact_documents(message.artifact)]
        missing = [document for document in carried if document.text not in text]
        text = "".join(document.text + separator for document in missing) + text
        documents += carried
    return text, documents


def _block(block: Any) -> str | DialogueDocument:
    """The text of a content block, or the document that it holds."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text" and "metadata" not in block:
        return str(block.get("text", ""))
    if kind in ("text", "text-plain", "document") and (text := _text_of(block)) is not None:
        named = {name: block[name] for name in ("id", "title", "context") if block.get(name)}
        return DialogueDocument(text, {**named, **(block.get("metadata") or {})})
    if kind in _IGNORED_BLOCKS:
        return ""
    raise UnsupportedError(f"A message has a block of type {kind!r}, but this model reads only text. Leave it out.")


def _text_of(block: Mapping[str, Any]) -> str | None:
    """The text of a document block in LangChain's form or, with a `source`, in Anthropic's."""
    source = block.get("source")
    text = source.get("data") if isinstance(source, Mapping) and source.get("type") == "text" else block.get("text")
    return text if isinstance(text, str) else None


def _artifact_documents(artifact: Any) -> list[Any]:
    """The documents in the artifact of a tool message."""
    items = artifact if isinstance(artifact, list | tuple) else [artifact]
    return [item for item in items if isinstance(item, Document)]


def to_document(item: Any) -> DialogueDocument:
    """The document of a `Document`, a text, or a mapping such as `{"text": ..., "title": ...}`."""
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
    raise InputError(f"A document must be a Document, a text or a mapping with 'text', not {item!r:.80}.")
