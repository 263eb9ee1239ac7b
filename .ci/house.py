"""The order of `ragkv/`, part of `make check`.

    python .ci/house.py

What counts is what a reader must hold in mind: few rooms, few files in each, no long file, one
class of each name, and one value a line. The limits stand in pyproject.toml under
`tool.ragkv.house`.
"""

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path.cwd()


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ragkv"]["house"]
    found = list(faults(limits))
    print("\n".join(found) or "The house keeps its limits.")
    return 1 if found else 0


def faults(limits: dict[str, int]) -> Iterator[str]:
    """What breaks the limits, a sentence each."""
    texts = {
        file.relative_to(ROOT): file.read_text("utf-8")
        for file in sorted((ROOT / "ragkv").rglob("*.py"))
    }
    rooms = {file.parts[1] for file in texts if len(file.parts) > 2}
    if len(rooms) > limits["rooms"]:
        names = ", ".join(sorted(rooms))
        yield f"ragkv/ has {len(rooms)} rooms; the limit is {limits['rooms']}: {names}."
    for folder, count in Counter(file.parent for file in texts).items():
        if count > limits["files_in_a_package"]:
            yield f"{folder} has {count} files; the limit is {limits['files_in_a_package']}."
    for file, text in texts.items():
        count = len(text.splitlines())
        if count > limits["lines_in_a_file"]:
            yield f"{file} has {count} lines; the limit is {limits['lines_in_a_file']}."
    trees = {file: ast.parse(text) for file, text in texts.items()}
    yield from _repeated_classes(trees)
    for file, tree in trees.items():
        for line in _packed_assignments(tree):
            yield f"{file}:{line} assigns three or more values in one line: give each its own."


def _repeated_classes(trees: dict[Path, ast.Module]) -> Iterator[str]:
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    for name, files in sorted(places.items()):
        if len(files) > 1:
            yield f"The class name {name} stands {len(files)} times: {', '.join(map(str, files))}."


def _packed_assignments(tree: ast.Module) -> Iterator[int]:
    """The lines that assign three or more values from a literal tuple."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if len(node.value.elts) >= 3 and any(isinstance(t, ast.Tuple) for t in node.targets):
            yield node.lineno


if __name__ == "__main__":
    sys.exit(main())
