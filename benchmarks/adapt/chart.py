"""The picture of the README, what `declutr adapt` brought: `python -m benchmarks.adapt.chart > docs/adapted.svg`."""

from pathlib import Path

from declutr.common.storage import read_json

RESULT = Path(__file__).parents[1] / "results" / "adapt_all-minilm-l6-v2_epyc-2cores_2026-11-24.json"
_LEFT, _POINT, _ROW = 170, 32, 24  # pixels: the names, a point of recall, a run
_COLOURS = {"python-peps": "#1f77b4", "ethereum-eips": "#c44e00", "scotus-2009-2011": "#2a7f3f"}


def chart() -> str:
    """An SVG with the difference of every run's chosen encoder to its start, and its 95% interval."""
    runs = [run for run in read_json(RESULT)["runs"] if run["chosen"]]
    height = 70 + _ROW * len(runs)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img" font-family="sans-serif" '
        'font-size="13"><title>Difference of recall@1 after declutr adapt, nine runs</title>',
        f'<rect width="640" height="{height}" fill="#ffffff"/>',
        '<text x="10" y="20">all-MiniLM-L6-v2 after declutr adapt: points of recall@1 on unseen documents</text>',
    ]
    for points in range(0, 15, 2):
        x = _LEFT + _POINT * points
        lines.append(f'<line x1="{x}" x2="{x}" y1="34" y2="{height - 26}" stroke="#dddddd"/>')
        lines.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{points:+d}</text>')
    for number, run in enumerate(runs):
        y, found, colour = 48 + _ROW * number, run["distant"], _COLOURS[run["source"]]
        low, middle, high = (_LEFT + _POINT * found[name] for name in ("low", "value", "high"))
        lines.append(f'<text x="10" y="{y + 5}">{run["source"]}, seed {run["seed"]}</text>')
        lines.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        lines.append(f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(chart(), end="")
