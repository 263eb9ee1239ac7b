"""Draws prompt.svg: one question's prompt under three ways of reuse. `python docs/figures/prompt.py`.

The token counts are those of a question that `make demo` prints: 50 exact, 449 fused, 80 recomputed, 9 computed.
"""

import random
from html import escape
from pathlib import Path

COLORS = {"reused exactly": "#2f9e77", "reused, fused": "#6c8ee6", "computed": "#d9822b"}
PARTS = (("system text, passage 1", 50), ("passages 2 to 6", 529), ("question", 9))
TOKENS = sum(tokens for _, tokens in PARTS)
SCALE = 1.3  # pixels for a token
LEFT, BAR, GAP, TOP = 150, 34, 22, 64
ROWS = ("full prefill", "prefix cache", "ragkv, ratio .15")


def kinds(row: str) -> list[str]:
    """What becomes of each token."""
    if row == "full prefill":
        return ["computed"] * TOKENS
    first, passages, question = (tokens for _, tokens in PARTS)
    behind = ["computed"] * passages
    if row != "prefix cache":
        behind = ["reused, fused"] * passages
        for place in random.Random(3).sample(range(passages), 80):
            behind[place] = "computed"
    return ["reused exactly"] * first + behind + ["computed"] * question


def draw() -> str:
    """The picture as SVG."""
    width, height = LEFT + TOKENS * SCALE + 20, TOP + len(ROWS) * (BAR + GAP) + 30
    shapes = [f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>']
    x = float(LEFT)
    for name, tokens in PARTS:
        end = x + tokens * SCALE
        anchor, at = {"question": ("end", end), PARTS[0][0]: ("start", x)}.get(name, ("middle", (x + end) / 2))
        shapes.append(f'<text x="{at:.0f}" y="20" text-anchor="{anchor}">{escape(name)}</text>')
        shapes.append(f'<path d="M{x + 1:.1f} 34V28H{end - 1:.1f}V34" fill="none" stroke="#777777"/>')
        x = end
    for number, row in enumerate(ROWS):
        top = TOP + number * (BAR + GAP) - 14
        shapes.append(f'<text x="{LEFT - 12}" y="{top + 22}" text-anchor="end">{escape(row)}</text>')
        shapes += runs(kinds(row), top)
    x = float(LEFT)
    for kind, color in COLORS.items():
        shapes.append(f'<rect x="{x:.0f}" y="{height - 24}" width="14" height="14" fill="{color}"/>')
        shapes.append(f'<text x="{x + 20:.0f}" y="{height - 12}">{escape(kind)}</text>')
        x += 150
    style = "<style>text{font:14px sans-serif;fill:#222222}</style>"
    box = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{style}\n' + "\n".join(shapes) + "\n</svg>\n"


def runs(tokens: list[str], top: int) -> list[str]:
    """A rectangle for each run of equal tokens."""
    shapes, start = [], 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or tokens[place] != tokens[start]:
            x, width = LEFT + start * SCALE, (place - start) * SCALE
            color = COLORS[tokens[start]]
            shapes.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
            start = place
    return shapes


if __name__ == "__main__":
    Path(__file__).with_name("prompt.svg").write_text(draw(), "utf-8")
