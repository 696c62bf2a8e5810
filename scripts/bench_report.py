"""What bench.py says: tables for the terminal, and a page with the same tables and plots in one file."""

import html
from collections.abc import Sequence
from typing import Any

import bench_stats
from bench_runs import Law

HEADS = ("", "tok/s", "quartiles", "whole call", "ratio", "95%", "decode ratio", "tau", "alpha", "texts")
PARTS = ("", "round ms", "draft", "verify", "accept", "commit", "rest", "window", "predicted", "measured", "prefill ms",
         "MB/token", "MFLOP/token", "of read", "of matmul")  # fmt: skip
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
figure{margin:2em 0}svg{max-width:100%;height:auto}figcaption,.note{color:#555}
.good{color:#176b2c}.bad{color:#b00020}"""


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def span(values: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if not values else f"{values[0]:.{digits}f}..{values[-1]:.{digits}f}"


def title(cell: dict) -> str:
    count = len({i for group in cell["groups"] for i in group["prompts"]})
    done = min(len(way["runs"]) for way in cell["ways"].values())
    left = "" if cell["complete"] else f" (stopped after {done} of {len(cell['groups'])} groups)"
    return f"batch {cell['batch']}, {Law(cell['temperature'], cell['top_p'])}, {count} prompts{left}"


def rates(cell: dict) -> list[list[str]]:
    """Cells of the table of rates; the first line is its head."""
    lines: list[list[str]] = [list(HEADS)]
    for row in bench_stats.summary(cell):
        mark = " *" if row["name"] == row.get("wall_baseline") else ""
        lines.append([
            row["name"] + mark, number(row["decode_rate"], 1), span(row["decode_quartiles"], 1),
            number(row["wall_rate"], 1), number(row.get("wall_ratio")), span(row.get("wall_ratio_interval")),
            number(row.get("decode_ratio")), number(row["tau"]), number(row["alpha"]), texts(row["equality"]),
        ])  # fmt: skip
    return lines


def texts(equality: dict | None) -> str:
    """Whether texts were plain decoding's."""
    if equality is None:
        return "-"
    parted = equality["parted"]
    far = [place for place in parted if not place["near_tie"]]
    said = f"{equality['equal']}/{equality['texts']} equal"
    if far:
        return f"{said}, {len(far)} DIFFER"
    return said + (f", near ties <= {max(p['margin'] for p in parted):.1e}" if parted else "")


def parts(cell: dict, ceilings: dict | None) -> list[list[str]]:
    """Cells of the table of what a round consists of; [] without parts."""
    lines: list[list[str]] = [list(PARTS)]
    for row in bench_stats.summary(cell):
        part = row["split"]
        if not part or "round_ms" not in part:
            continue
        per_token = 1 / row["tokens_per_pass"]
        roof = roofline(row, ceilings)
        lines.append([
            row["name"], *(number(part[f"{name}_ms"]) for name in ("round", *bench_stats.PARTS, "rest")),
            number(part["width"], 1), number(row.get("predicted_ratio")), number(row.get("decode_ratio")),
            number(row["prefill_ms"], 0), number(1e-6 * part["bytes"] * per_token, 0),
            number(1e-6 * part["flops"] * per_token, 0), *(f"{100 * share:.0f}%" for share in roof[2:]),
        ])  # fmt: skip
    return lines if len(lines) > 1 else []


def roofline(row: dict, ceilings: dict | None) -> tuple[float, float, float, float]:
    """FLOPs per byte, GFLOP/s, and shares of the read and matmul ceilings, of a way's verify passes."""
    part = row["split"]
    rate = 1e-6 * part["flops"] / part["verify_ms"]
    if not ceilings:
        return part["flops"] / part["bytes"], rate, 0.0, 0.0
    read = 1e-6 * part["bytes"] / part["verify_ms"] / ceilings["read_gb_s"]
    return part["flops"] / part["bytes"], rate, read, rate / ceilings["matmul_gflop_s"][row["dtype"]]


def categories(cell: dict) -> list[list[str]]:
    """Ratio of whole calls, and tau, by category; [] where there is one."""
    rows = [row for row in bench_stats.summary(cell) if row["categories"] and row["kind"] != "plain"]
    names = list(dict.fromkeys(name for row in rows for name in row["categories"]))
    if not rows:
        return []
    lines = [["ratio (tau)", *names, "mean ratio"]]
    for row in rows:
        found = [row["categories"].get(name, {}) for name in names]
        cells = [f"{number(one.get('wall_ratio'))} ({number(one.get('tau'))})" for one in found]
        lines.append([row["name"], *cells, number(row["macro_wall_ratio"])])
    return lines


def depths(cell: dict) -> list[list[str]]:
    """alpha by position."""
    rows = [row for row in bench_stats.summary(cell) if row["per_position"]]
    widest = max((len(row["per_position"]) for row in rows), default=0)
    if not widest:
        return []
    lines = [["alpha at depth", *map(str, range(1, widest + 1))]]
    return lines + [[row["name"], *(number(a) for a in row["per_position"]),
                     *[""] * (widest - len(row["per_position"]))] for row in rows]  # fmt: skip


def textbook(found: dict) -> list[list[str]]:
    lines = [["", "K", "c", "v", "tokens/round", "closed form", "ratio", "form, v = 1", "form, measured v"]]
    for row in found["lengths"]:
        lines.append([
            f"batch {row['batch']} {row['dtype']}", str(row["num_draft_tokens"]), number(row["draft_cost"], 3),
            *(number(row[name]) for name in ("verify_cost", "tokens_per_round", "expected_tokens", "ratio",
                                             "expected_ratio", "expected_ratio_measured_v")),
        ])  # fmt: skip
    return lines


def against_peer(cell: dict) -> list[str]:
    """Sentences: plain decoding beside the peer's of the same dtype, and the best with drafts beside its best."""
    rows = [row for row in bench_stats.summary(cell) if row["wall_rate"]]
    theirs = [row for row in rows if row["kind"] == "peer"]

    def said(ours: list[dict], peers: list[dict]) -> list[str]:
        if not ours or not peers:
            return []
        a, b = (max(rows, key=lambda row: row["wall_rate"]) for rows in (ours, peers))
        return [f"{a['name']} is {a['wall_rate'] / b['wall_rate']:.2f} times {b['name']} "
                f"({a['wall_rate']:.1f} and {b['wall_rate']:.1f} tok/s, whole calls)"]  # fmt: skip

    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in theirs):
        ours = [row for row in rows if row["kind"] != "peer" and row["dtype"] == dtype]
        peers = [row for row in theirs if row["dtype"] == dtype]
        for drafted in (False, True):
            lines += said(*([row for row in some if bool(row["drafter"]) == drafted] for some in (ours, peers)))
    return lines


# --- the terminal


def text_table(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )


def cell_table(cell: dict) -> str:
    tables = [table for table in (rates(cell), categories(cell)) if table]
    return f"\n{title(cell)}; * is the baseline\n" + "\n\n".join(map(text_table, tables))


def verdict(result: dict) -> list[str]:
    """What can be said of the texts."""
    ours = [way for cell in result["cells"] for way in cell["ways"].values() if way["kind"] == "speculative"]
    checked = [way["equality"] for way in ours if way.get("equality")]
    drawn = sum(len(way["runs"]) for way in ours if not way.get("equality"))
    total, equal = (sum(found[name] for found in checked) for name in ("texts", "equal"))
    parted = [place["margin"] for found in checked for place in found["parted"] if place["near_tie"]]
    lines = [f"{equal} of {total} compared texts are those of plain decoding with the same weights, word for word."]
    if parted:
        lines.append(f"{len(parted)} part where the target was undecided, by {max(parted):.1e} at most: near ties.")
    if drawn:
        lines.append(f"{drawn} decodings under rules that promise the law and not the text were not compared.")
    if result["unequal"]:
        lines += [f"DIFFERENT TEXT: {words}" for words in result["unequal"]]
    elif total:
        lines.append("No text differs for another reason.")
    return lines


def closing(result: dict) -> str:
    """What belongs behind the tables of the cells."""
    said = []
    for cell in result["cells"]:
        tables = [table for table in (parts(cell, result["ceilings"]), depths(cell)) if table]
        if tables:
            said += ["", title(cell), "\n\n".join(map(text_table, tables))]
        said += against_peer(cell)
    if result.get("textbook", {}).get("lengths"):
        said += ["", f"Leviathan et al. (2023), alpha = {result['textbook']['alpha']:.3f}",
                 text_table(textbook(result["textbook"]))]  # fmt: skip
    said += ["", *verdict(result), machine(result)]
    return "\n".join(said)


def machine(result: dict) -> str:
    found = result["ceilings"]
    if not found:
        return result["machine"]
    rate = ", ".join(f"{dtype} {value:.0f}" for dtype, value in found["matmul_gflop_s"].items())
    return f"{result['machine']}; reads {found['read_gb_s']:.1f} GB/s, multiplies at {rate} GFLOP/s"


def passes_table(found: dict) -> str:
    lines = [["weights", "batch", "window", "median ms", "minimum", "plain steps", "floor / ms"]]
    for row in found["passes"]:
        lines.append([row["dtype"], str(row["batch"]), str(row["window"]), number(row["ms"], 1),
                      number(row["min_ms"], 1), number(row["plain_steps"]), number(row["of_floor"])])  # fmt: skip
    where = f"capacity {found['capacity']}, {found['length']} tokens of text; floor: every float32 weight read once"
    return f"{where}\n{text_table(lines)}\n{machine(found)}"


# --- the page


def page(result: dict, figures: Sequence[tuple[str, str]]) -> str:
    """One HTML file: nothing is fetched. ``figures`` are captions and SVG."""
    options = result["options"]
    body = [f"<h1>Decoding {html.escape(str(options['model']))}</h1>", f"<p>{html.escape(machine(result))}</p>"]
    tone = "bad" if result["unequal"] else "good"
    body.append(f'<p class="{tone}">{"<br>".join(map(html.escape, verdict(result)))}</p>')
    body.append(f'<p class="note">{html.escape(how(options))}</p>')
    for caption, svg in figures:
        body.append(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>")
    if result.get("textbook", {}).get("lengths"):
        body += ["<h2>Closed forms</h2>", html_table(textbook(result["textbook"]))]
    for cell in result["cells"]:
        body.append(f"<h2>{html.escape(title(cell))}</h2>")
        made = (rates(cell), categories(cell), parts(cell, result["ceilings"]), depths(cell))
        body += [html_table(table) for table in made if table]
        body += [f"<p>{html.escape(line)}</p>" for line in against_peer(cell)]
    head = f'<meta charset="utf-8"><title>specjax benchmark</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=\"en\"><head>{head}</head><body>{''.join(body)}</body></html>\n"


def how(options: dict[str, Any]) -> str:
    ends = "end tokens ignored" if options["ignore_eos"] else "texts end where the model ends them"
    return (
        f"{options['max_new_tokens']} new tokens at most, {ends}; {options['repeats']} interleaved repeats. tok/s is "
        "decoding alone, with quartiles over single groups and repeats; a whole call has the prefill in it. Ratios are "
        "against the faster plain decoding (*) of the same batch and temperature, with an interval of 95% over prompts."
    )


def html_table(lines: list[list[str]]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells) + "</tr>"

    return "<table>" + line(lines[0], "th") + "".join(line(cells, "td") for cells in lines[1:]) + "</table>"
