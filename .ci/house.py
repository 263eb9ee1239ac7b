"""The size and the order of `ragkv/`, part of `make check`: how many lines, rooms and files, and no class name twice.

    python .ci/house.py

The limits stand in pyproject.toml under `tool.ragkv.house`. `lines` only goes down: what is added
makes room for itself.
"""

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path.cwd()


def lines_of(package: Path) -> dict[Path, int]:
    """The number of lines of every Python file, relative to the checkout."""
    return {file.relative_to(ROOT): len(file.read_bytes().splitlines()) for file in sorted(package.rglob("*.py"))}


def room_of(file: Path) -> str:
    """The package at the top of `ragkv/` that has `file`, or the file itself if it lies there."""
    return "/".join(file.parts[:2])


def growth_since_main(lines: dict[Path, int]) -> str:
    """Which rooms have more lines than on main, the most grown first."""
    before: Counter[str] = Counter()
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", "main", "ragkv"], capture_output=True, text=True)
    if listed.returncode:
        return "There is no branch main to compare with."
    for name in listed.stdout.split():
        if name.endswith(".py"):
            text = subprocess.run(["git", "show", f"main:{name}"], capture_output=True, check=True).stdout
            before[room_of(Path(name))] += len(text.splitlines())
    now: Counter[str] = Counter()
    for file, count in lines.items():
        now[room_of(file)] += count
    grown = sorted(((now[room] - before[room], room) for room in now if now[room] > before[room]), reverse=True)
    return "Since main: " + (", ".join(f"{room} +{count}" for count, room in grown) or "no room has grown") + "."


def faults(limits: dict[str, int]) -> list[str]:
    """What breaks the limits, a sentence each."""
    lines, found = lines_of(ROOT / "ragkv"), []
    total = sum(lines.values())
    if total > limits["lines"]:
        found.append(f"ragkv/ has {total} lines of Python; the limit is {limits['lines']}. {growth_since_main(lines)}")
    rooms = {file.parts[1] for file in lines if len(file.parts) > 2}
    if len(rooms) > limits["rooms"]:
        found.append(f"ragkv/ has {len(rooms)} rooms; the limit is {limits['rooms']}: {', '.join(sorted(rooms))}.")
    for folder, count in Counter(file.parent for file in lines).items():
        if count > limits["files_in_a_package"]:
            found.append(f"{folder} has {count} files; the limit is {limits['files_in_a_package']}.")
    classes: defaultdict[str, list[Path]] = defaultdict(list)
    for file in lines:
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(file)
    for name, files in sorted(classes.items()):
        if len(files) > 1:
            found.append(f"The class name {name} stands {len(files)} times: {', '.join(map(str, files))}.")
    return found


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ragkv"]["house"]
    found = faults(limits)
    print("\n".join(found) or "The house keeps its limits.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
