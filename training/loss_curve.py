"""Join the loss logs of one or more runs into loss.csv and draw loss.svg (log scale).

python -m training.loss_curve --logs .ckpt/loss.jsonl .ckpt2/loss.jsonl --out models/tandem-mini
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

COLUMNS = ("run", "step", "tokens", "seconds", "lr", "loss", "answer_loss")
WIDTH, HEIGHT, MARGIN = 720, 360, 50


def read_logs(paths: list[Path], every_steps: int) -> list[dict[str, Any]]:
    """Entries of all logs, of each only those after every so many of its steps; `run` counts from 1."""
    entries = []
    for run, path in enumerate(paths, 1):
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        stride = max(1, every_steps // (logged[1]["step"] - logged[0]["step"]))
        entries += [{"run": run, **entry} for entry in logged[stride - 1 :: stride]]
    return entries


def draw(entries: list[dict[str, Any]]) -> str:
    """An SVG of the loss of all tokens and of answer tokens over millions of tokens."""
    most = max(entry["tokens"] for entry in entries)
    top, bottom = 1.0, 0.005

    def point(entry: dict[str, Any], key: str) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * entry["tokens"] / most
        height = math.log(min(max(entry[key], bottom), top) / bottom) / math.log(top / bottom)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * height:.1f}"

    def label(x: float, y: float, text: str, color: str = "black") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" font-size="12" font-family="sans-serif" fill="{color}">{text}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in (1.0, 0.1, 0.01):
        height = math.log(value / bottom) / math.log(top / bottom)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * height
        lines.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ccc"/>')
        lines.append(label(8, y + 4, f"{value:g}"))
    for key, color, y in (("loss", "#1f5fa8", 20), ("answer_loss", "#b0461e", 36)):
        points = " ".join(point(entry, key) for entry in entries)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        lines.append(label(WIDTH - 220, y, key.replace("_", " ") + " (nats a token)", color))
    lines.append(label(MARGIN, HEIGHT - 18, f"0 to {most / 1e6:.0f} M tokens"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path("models/tandem-mini"))
    parser.add_argument("--every-steps", type=int, default=100)
    args = parser.parse_args()
    entries = read_logs(args.logs, args.every_steps)
    with (args.out / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)
    (args.out / "loss.svg").write_text(draw(entries))


if __name__ == "__main__":
    main()
