"""Writes the table of docs/exactness.md from what the tests of the joint law left in .cache/exactness.

    make test-full                      # runs the tests, then this
    python scripts/exactness_table.py   # again, without the tests
"""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "exactness"
PAGE = ROOT / "docs" / "exactness.md"
START, END = "<!-- exactness table -->\n", "<!-- /exactness table -->"


def table(entries: list[dict]) -> str:
    """Markdown: a row per rule and drafter with its smallest p-value over the sampler settings, and where it is."""
    settings = [name or "temperature 1" for name in entries[0]["p_values"]]
    lines = [
        f"Chi-square p-values of the joint law of five tokens over several rounds: {entries[0]['rows']} texts for each",
        f"of {len(settings)} sampler settings, fixed keys. Wrong laws give less than 0.001",
        "(`tests/exactness/test_negative_controls.py`); of so many right ones the smallest is small by chance. Written",
        "by `make test-full` (`scripts/exactness_table.py`).",
        "",
        "| rule, proposal | median p | smallest p | at |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        p_values = sorted((p, name or "temperature 1") for name, p in entry["p_values"].items())
        lowest, where = p_values[0]
        lines.append(f"| {entry['name']} | {statistics.median(p for p, _ in p_values):.2f} | {lowest:.3f} | {where} |")
    return "\n".join([*lines, "", "Settings: " + "; ".join(settings) + ".", ""])


def main() -> None:
    entries = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    if not entries:
        sys.exit(f"no results in {RESULTS.relative_to(ROOT)}: run `make test-full` first")
    text = PAGE.read_text()
    before, rest = text.split(START)
    after = rest[rest.index(END) :]
    written = table(entries)
    PAGE.write_text(before + START + written + after)
    print(written)


if __name__ == "__main__":
    main()
