"""Draw docs/how_it_works.svg: the way of a prompt, from its text to an answer or a refusal.

Colours of its own stand on a white sheet, so that it reads on GitHub's light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "how_it_works.svg"
WIDTH, HEIGHT = 900, 330
MODEL, PROBE, GATE, ANSWER, REFUSAL = "#dbe9f6", "#dff0df", "#fde8d2", "#eef3ff", "#fbe3dd"
INK, LINE = "#111111", "#555555"


@dataclass(frozen=True)
class Box:
    """A step: its corner, its size, what it is and what happens there."""

    x: int
    y: int
    width: int
    height: int
    colour: str
    title: str
    lines: tuple[str, ...]

    def drawn(self) -> list[str]:
        """The box and its text."""
        middle = self.x + self.width // 2
        top = self.y + 22
        return [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"'
            f' fill="{self.colour}" stroke="{LINE}"/>',
            text(middle, top, self.title, bold=True),
            *(text(middle, top + 19 * (n + 1), line) for n, line in enumerate(self.lines)),
        ]


def text(x: int, y: int, words: str, *, bold: bool = False, size: int = 13) -> str:
    """A line of text around ``x``."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{INK}"'
        f' text-anchor="middle">{escape(words)}</text>'
    )


def arrow(path: str) -> str:
    """A line with a point at its end."""
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2" marker-end="url(#end)"/>'


BOXES = (
    Box(20, 45, 150, 82, MODEL, "the prompt", ("a chat, rendered by", "the model's template")),
    Box(202, 45, 166, 82, MODEL, "the prefill", ("one pass of your own", "model over the prompt")),
    Box(
        400,
        45,
        220,
        82,
        PROBE,
        "one head of each layer",
        ("read at the last prompt token;", "a probe makes it a truth logit"),
    ),
    Box(
        660,
        45,
        220,
        82,
        PROBE,
        "the depth mean",
        ("the mean of the truth logits;", "calibrated: the risk, 0 to 1"),
    ),
    Box(
        660,
        205,
        220,
        82,
        GATE,
        "the gate",
        ("is the risk below the threshold?", "nothing was decoded so far"),
    ),
    Box(
        330,
        158,
        240,
        74,
        ANSWER,
        "the answer",
        ("decoded from the same KV cache,", "so no second prefill"),
    ),
    Box(330, 250, 240, 62, REFUSAL, "withheld: a refusal", ("no token is decoded",)),
)
ARROWS = (
    "M170 86H196",
    "M368 86H394",
    "M620 86H654",
    "M770 127V199",
    "M660 230H620V195H576",
    "M660 262H620V281H576",
    "M285 127V195H324",
)
LABELS = (
    (450, 30, "the risk is known before the first answer token"),
    (602, 187, "yes"),
    (602, 300, "no"),
    (246, 165, "KV cache"),
)


def draw() -> str:
    """The picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif">',
        "<title>From a prompt to an answer or a refusal</title>",
        '<defs><marker id="end" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker>',
        "</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        *(line for box in BOXES for line in box.drawn()),
        *map(arrow, ARROWS),
        *(text(x, y, words) for x, y, words in LABELS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
