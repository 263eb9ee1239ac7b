"""Draws terminal.svg from the text beside it: `make demo > docs/figures/terminal.txt`, then this
script.
"""

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = "make demo"
# lines of what was printed
FIRST = 23
LAST = 4
# columns; then pixels: a line, the text's corner, a character
WIDTH = 118
LINE = 19
LEFT = 18
TOP = 62
CHAR = 7.83
# of the demo's ways to answer
COLORS = {"full": "#a9b1bb", "prefix": "#a9b1bb", "cold": "#f7b05e", "warm": "#63cabf"}


def shown() -> list[str]:
    """The first and the last lines, cut at the picture's width."""
    printed = (HERE / "terminal.txt").read_text("utf-8").rstrip().splitlines()
    lines = [f"$ {COMMAND}", *printed[:FIRST], "…", "", *printed[-LAST:]]
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines]


def draw() -> str:
    """The picture as SVG."""
    lines = shown()
    width = 2 * LEFT + round(WIDTH * CHAR)
    height = TOP + LINE * len(lines)
    shapes = [f'<rect width="{width}" height="{height}" rx="9" fill="#1b1f23"/>']
    shapes += [
        f'<circle cx="{LEFT + 4 + 20 * n}" cy="20" r="6" fill="{c}"/>'
        for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    for number, line in enumerate(lines):
        color = COLORS.get(
            line.split()[0] if line.startswith("  ") and line.strip() else "", "#e8e6e3"
        )
        shapes.append(
            f'<text x="{LEFT}" y="{TOP + LINE * number}" fill="{color}">{escape(line)}</text>'
        )
    style = (
        "<style>text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans "
        "Mono',monospace;white-space:pre}</style>"
    )
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{style}\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (HERE / "terminal.svg").write_text(draw())
