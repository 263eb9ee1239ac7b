"""LangChain components over ragkv: change the `llm =` line and keep the chain.

    from ragkv.langchain import ChatRagKV

    llm = ChatRagKV(model="reader")
    llm.ingest(documents)                    # their KV is computed once
    chain = prompt | llm | StrOutputParser() # as it was; chunk texts are recognised in the prompt

This is the one place that imports LangChain (`pip install "ragkv[langchain]"`).
"""

from ragkv.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401 - an extra
except ImportError as error:
    raise MissingExtraError("langchain-core", "langchain", "ragkv.langchain") from error

from .baselines import map_reduce_chain, map_rerank_chain
from .byte_store import RagKVByteStore
from .chat import ChatRagKV
from .documents_chain import create_cached_documents_chain
from .embeddings import RagKVEmbeddings
from .history import RagKVChatMessageHistory
from .registry import close_engines
from .retriever import RagKVRetriever
from .vector_store import RagKVVectorStore

__all__ = [
    "ChatRagKV",
    "RagKVByteStore",
    "RagKVChatMessageHistory",
    "RagKVEmbeddings",
    "RagKVRetriever",
    "RagKVVectorStore",
    "close_engines",
    "create_cached_documents_chain",
    "map_reduce_chain",
    "map_rerank_chain",
]
