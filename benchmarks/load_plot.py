"""The picture of a sweep: latency and rate over the number of clients, one column for each shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, RED, GREY = "#1f5a99", "#c0562b", "#666666"


def draw(sweeps: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    ``sweeps``: shape -> {"direct_rate", "direct_way", "levels": [{"clients", "p50_ms", "p99_ms", "rate"}]}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(2, len(sweeps), figsize=(5.2 * len(sweeps), 6.4), squeeze=False, sharex="col")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for column, (shape, sweep) in enumerate(sweeps.items()):
        levels = sweep["levels"]
        clients = [level["clients"] for level in levels]
        above, below = axes[0][column], axes[1][column]
        for key, colour, label, up in (("p50_ms", BLUE, "p50", -4), ("p99_ms", RED, "p99", 4)):
            values = [level[key] for level in levels]
            above.plot(clients, values, "o-", color=colour, markersize=4)
            above.annotate(label, (clients[-1], values[-1]), (6, up), textcoords="offset points", va="center",
                           color=colour, annotation_clip=False)  # fmt: skip
        above.set(title=shape, yscale="log", ylabel="latency, ms" if column == 0 else "")
        rates = [level["rate"] for level in levels]
        below.plot(clients, rates, "o-", color=BLUE, markersize=4)
        direct = sweep["direct_rate"]
        below.axhline(direct, color=GREY, linestyle="--", linewidth=1)
        below.annotate(f"engine called directly, {sweep['direct_way']}", (clients[0], direct), (0, 4),
                       textcoords="offset points", color=GREY, fontsize=9)  # fmt: skip
        below.set(xlabel="clients", xscale="log", ylabel="prompts per second" if column == 0 else "")
        below.set_ylim(0, max([*rates, direct]) * 1.18)
        below.set_xscale("log", base=2)
        below.set_xticks(clients)
        below.xaxis.set_major_formatter(plain)
        above.yaxis.set_major_formatter(plain)
        for axis in (above, below):
            axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
