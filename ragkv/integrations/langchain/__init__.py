"""LangChain components over ragkv: change the `llm =` line and keep the chain.

    from ragkv.integrations.langchain import ChatRagKV

    llm = ChatRagKV(model="smollm2")
    llm.ingest(documents)                    # their KV is computed once
    chain = prompt | llm | StrOutputParser() # unchanged: chunk texts are recognised in the prompt

Only this package imports LangChain (`pip install "ragkv[langchain]"`).
"""

from ragkv.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401 - an optional dependency
except ImportError as error:
    raise MissingExtraError(
        "langchain-core", "langchain", "ragkv.integrations.langchain"
    ) from error

from .chat import ChatRagKV
from .engines import close_engines
from .history import RagKVChatMessageHistory
from .retriever import RagKVEmbeddings, RagKVRetriever

__all__ = [
    "ChatRagKV",
    "RagKVChatMessageHistory",
    "RagKVEmbeddings",
    "RagKVRetriever",
    "close_engines",
]
