"""LangChain components over ragkv: change the `llm =` line and keep the chain.

    from ragkv.integrations.langchain import ChatRagKV

    llm = ChatRagKV(model="reader")
    llm.ingest(documents)                    # their KV is computed once
    chain = prompt | llm | StrOutputParser() # unchanged: chunk texts are recognised in the prompt

Only this package imports LangChain (`pip install "ragkv[langchain]"`).
"""

from ragkv.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401 - an optional dependency
except ImportError as error:
    raise MissingExtraError("langchain-core", "langchain", "ragkv.integrations.langchain") from error

from .byte_store import RagKVByteStore
from .chains import create_cached_documents_chain, map_reduce_chain, map_rerank_chain
from .chat import ChatRagKV
from .embeddings import RagKVEmbeddings
from .engines import close_engines
from .history import RagKVChatMessageHistory
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
