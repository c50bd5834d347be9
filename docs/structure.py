"""Draw docs/structure.svg: the layers of tests/test_imports.py, highest first.  Run it after a
change of the layers."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "structure.svg"

# What a layer entry does, in a few words, and its colour.
OUTSIDE, OFFLINE, REQUEST, GROUND = "#dbe9f6", "#fde8d2", "#dff0df", "#ececec"
ROLES = {
    "hallutracer": ("what is public, for Python", OUTSIDE),
    "hallutracer_research": ("the paper, rivals, public sets, the demo model's making", OFFLINE),
    "service.cli": ("the commands", OUTSIDE),
    "service.library": ("load, train: for Python and the commands", OUTSIDE),
    "service.annexes": ("the list of the annexes", GROUND),
    "service.annexes.doctor": ("would it serve, and what to do if not", OUTSIDE),
    "service.annexes.hub": ("bundles on the hub, and copies of them", OUTSIDE),
    "service.annexes.traces": ("traces of requests, for OpenTelemetry", OUTSIDE),
    "service.annexes.feedback": ("takes what users say of answers", OUTSIDE),
    "service.annexes.guardrails": ("the protocols of other products' guardrails", OUTSIDE),
    "service.vllm_plugin": ("risks in vLLM's own server", OUTSIDE),
    "service.demo": ("the demo model and its questions", OFFLINE),
    "service.api": ("HTTP: routes, schemas, errors", OUTSIDE),
    "service.trainer": ("a training run and its card", OFFLINE),
    "service.serving": ("admission, deadlines, loaded bundles, metrics", REQUEST),
    "service.fitting": ("from activations and labels to probes and a classifier", OFFLINE),
    "service.data": ("rows, forms, labels, judges, collected activations", OFFLINE),
    "service.scoring": ("a request without HTTP: prompt, engine, risk report", REQUEST),
    "service.turn": ("what of an answer may be shown, and how it ends", REQUEST),
    "service.matching": ("whether a loaded model may serve a bundle", REQUEST),
    "service.prompts": ("text to token ids", REQUEST),
    "service.tool_calls": ("the calls of tools in an answer", GROUND),
    "service.judging": ("from a reading to what is said of it", REQUEST),
    "service.policies": ("named policies, the decision, who answers instead", REQUEST),
    "service.feedback": ("answers and labels, in a database", REQUEST),
    "service.access": ("named keys", REQUEST),
    "service.access.callers": ("who asks, and what it may choose", GROUND),
    "service.access.routes": ("the routes, and what a key needs for each", GROUND),
    "service.audit": ("who did what", REQUEST),
    "service.engines": ("run the model: what both engines share", REQUEST),
    "service.engines.transformers": ("the embedded engine", REQUEST),
    "service.engines.vllm": ("vLLM", REQUEST),
    "service.risk": ("the method: truth logits, depth mean, risk", REQUEST),
    "service.readout": ("sites, positions, shapes", REQUEST),
    "probes_store": ("the bundle format and the store", GROUND),
    "service.options": ("flag, variable or file: an option's value", GROUND),
    "service.errors": ("every error", GROUND),
    "service.settings": ("settings", GROUND),
    "service.json_limits": ("how much JSON of a caller is taken", GROUND),
    "service.batch_writer": ("a thread that writes what waits", GROUND),
    "service.progress": ("lines about long steps", GROUND),
    "service.proxies": ("which requests go through a proxy", GROUND),
}
WIDTH, ROW, GAP, LEFT = 860, 44, 8, 40
ABREAST = 3  # most boxes beside each other: more do not hold their words


def layers() -> list[list[str]]:
    """The list LAYERS, read from the test's source: each layer may import the layers below it."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [list(layer) for layer in ast.literal_eval(node.value)]
    raise SystemExit("tests/test_imports.py has no LAYERS")


def draw() -> str:
    """The picture as SVG text."""
    rows = layers()
    if unknown := sorted({name for row in rows for name in row} - set(ROLES)):
        raise SystemExit(f"docs/structure.py: add to ROLES what these do: {', '.join(unknown)}")
    lines = [(row[at : at + ABREAST], at) for row in rows for at in range(0, len(row), ABREAST)]
    height = len(lines) * ROW + (len(rows) + 1) * GAP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif">'
        ),
        "<title>The layers of the code; each may import those below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<path d="M20 {GAP}V{height - GAP - 10}" stroke="#666666" stroke-width="2"/>',
        f'<path d="M14 {height - GAP - 12}h12l-6 12z" fill="#666666"/>',
        (
            f'<text transform="translate(14 {height // 2}) rotate(-90)" font-size="12"'
            ' fill="#444444" text-anchor="middle">may import</text>'
        ),
    ]
    y = -ROW
    for line, at in lines:
        y += ROW if at else ROW + GAP  # boxes of one layer touch: none may import another
        width = (WIDTH - LEFT - GAP * len(line)) / len(line)
        for column, name in enumerate(line):
            role, colour = ROLES[name]
            x = LEFT + column * (width + GAP)
            middle = x + width / 2
            parts += [
                (
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="5"'
                    f' fill="{colour}" stroke="#888888"/>'
                ),
                (
                    f'<text x="{middle:.1f}" y="{y + 18}" font-size="13" font-weight="bold"'
                    f' fill="#111111" text-anchor="middle">{escape(name)}</text>'
                ),
                (
                    f'<text x="{middle:.1f}" y="{y + 35}" font-size="12" fill="#333333" '
                    f'text-anchor="middle">{escape(role)}</text>'
                ),
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
