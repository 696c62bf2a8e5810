"""Speculative decoding on paper and in simulation: closed forms beside the library's own `accept`.

    python scripts/simulate.py                                  # the numbers, and three figures in ./figures
    python scripts/simulate.py --rule block -K 8 --rounds 1000000
    python scripts/simulate.py --p .7,.2,.1 --q .5,.3,.2 --draft-cost 0.1 --out /tmp/figures

Every round drafts K tokens i.i.d. from q and verifies them against p. The figures need matplotlib:
pip install '.[plots]' in the clone.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from script_tools import run_script

from specjax import theory

P = (0.30, 0.25, 0.18, 0.12, 0.10, 0.05)
Q = (0.44, 0.15, 0.16, 0.05, 0.12, 0.08)
ACCEPTANCES = (0.6, 0.75, 0.9)  # whose best K is printed and drawn
LENGTHS = (2, 4, 8)  # K of the curves over alpha
SHIFTS = (0.3, 0.8, 1.4, 2.0, 2.8, 3.7, 4.8, 6.5, 9.5)  # between the two bells whose overlap is the simulated alpha

# Okabe and Ito's colours, told apart by colour-blind readers and in grey by their lightness.
BLACK, BLUE, ORANGE, GREEN, RED, GREY = "#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=law, default=P, metavar="P1,P2,..", help="target law, comma-separated")
    parser.add_argument("--q", type=law, default=Q, metavar="Q1,Q2,..", help="draft law, comma-separated")
    parser.add_argument("-K", "--num-draft-tokens", type=int, default=4, help="chain length (default 4)")
    parser.add_argument("--rule", choices=("rejection", "block", "match"), default="rejection")
    parser.add_argument("--coupled", action="store_true", help="with --rule match: draft with the target's noise")
    parser.add_argument("--rounds", type=int, default=200_000, help="simulated rounds (default 200,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-cost", type=float, default=0.05, help="c, one draft step / one target step (0.05)")
    parser.add_argument("--verify-cost", type=float, default=1.0, help="v, one verifying pass / one target step (1)")
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR", help="for the PNGs (./figures)")
    parser.add_argument("--no-figures", action="store_true", help="numbers only")
    return parser.parse_args(argv)


def law(text):
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give probabilities, separated by commas") from None


def main(argv=None):
    run_script(work, arguments(argv))


def work(args):
    simulation = numbers(args)
    if not args.no_figures:
        figures(args, simulation)


# --- numbers


def numbers(args):
    """Prints the simulation beside the closed forms, then the best K."""
    k = args.num_draft_tokens
    began = time.perf_counter()
    simulation = theory.simulate(
        args.p, args.q, k, rule=args.rule, rounds=args.rounds, seed=args.seed, coupled=args.coupled, progress=progress()
    )
    seconds = time.perf_counter() - began
    a, tokens = expected(args)
    error = simulation.tokens_per_round_error
    off = np.abs(simulation.law - args.p)

    title = f"{args.rule}{' with coupled drafts' if args.coupled else ''}, K={k}"
    print(f"{title}: {simulation.rounds:,} rounds in {seconds:.1f} s\n")
    print(f"{'':24}{'simulated':>18}{'closed form':>14}")
    print(f"{'alpha':24}{show(simulation.alpha):>18}{show(a):>14}")
    print(f"{'tokens per round':24}{f'{simulation.tokens_per_round:.4f} ± {error:.4f}':>18}{show(tokens):>14}")
    print(f"{'acceptance at 1 .. K':24}  {'  '.join(show(x) for x in simulation.per_position) or '-'}\n")
    for name, values in (("emitted law", simulation.law), ("p", args.p)):
        more = f"  .. ({len(values)} tokens)" if len(values) > 8 else ""
        print(f"{name:24}  {'  '.join(show(x) for x in values[:8])}{more}")
    print(f"{'largest difference':24}  {off.max():.4f}\n")

    print(f"best K (draft step c={args.draft_cost:g}, verifying pass v={args.verify_cost:g} plain steps; K up to 128)")
    for acceptance in ACCEPTANCES:
        costs = {"draft_cost": args.draft_cost, "verify_cost": args.verify_cost}
        best = theory.best_k(acceptance, **costs)
        print(f"  a={acceptance:<5g} K={best:<4d} {theory.speed_up(acceptance, best, **costs):.2f}x")
    return simulation


def expected(args):
    """alpha and tokens per round in closed form, None where there is none."""
    if args.coupled:
        return None, None
    if args.rule == "match":
        a = theory.match_alpha(args.p, args.q)
        return a, theory.expected_tokens(a, args.num_draft_tokens)
    a = theory.alpha(args.p, args.q)
    if args.rule == "rejection":
        return a, theory.expected_tokens(a, args.num_draft_tokens)
    try:  # what block accepts at a position depends on the positions before: there is no single alpha
        return None, theory.expected_tokens_block(args.p, args.q, args.num_draft_tokens)
    except ValueError:
        return None, None


def show(value):
    return "-" if value is None else f"{value:.4f}"


def progress(label="simulating"):
    """A line that is rewritten on a terminal; elsewhere one line every ten seconds."""
    terminal = sys.stderr.isatty()
    began = last = time.monotonic()

    def report(done, total):
        nonlocal last
        now = time.monotonic()
        if terminal and done == total:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        elif now - last >= (0.2 if terminal else 10):
            last = now
            line = f"{label}: {done:,} of {total:,} rounds, {now - began:.0f} s"
            print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return report


# --- figures


def figures(args, simulation):
    """Three PNGs in args.out."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install '.[plots]' in the clone, or pass --no-figures") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 200, "figure.constrained_layout.use": True, "font.size": 10, "axes.titlesize": 11,
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
            "grid.color": "#E4E4E4", "grid.linewidth": 0.7, "legend.edgecolor": "none", "legend.framealpha": 1.0,
            "lines.linewidth": 1.8,
        }
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("tokens_per_pass.png", tokens_per_pass), ("speed_up.png", speed_up), ("rule.png", the_rule),
    ):  # fmt: skip
        figure, axes = plt.subplots(figsize=(6.4, 4.0))
        draw(axes, args, simulation)
        figure.savefig(args.out / name)
        plt.close(figure)
        print(f"wrote {args.out / name}")


def tokens_per_pass(axes, args, simulation):
    """E over alpha: the closed form as curves, simulations of overlapping bells as points."""
    grid = np.linspace(0, 1, 201)
    rounds = max(1, args.rounds // 10)
    for k, colour, marker in zip(LENGTHS, (RED, GREEN, BLUE), "so^", strict=True):
        axes.plot(grid, [theory.expected_tokens(a, k) for a in grid], color=colour, clip_on=False)
        points = []
        for number, shift in enumerate(SHIFTS):
            p, q = bells(shift)
            seed = (args.seed + 1 + number) % 2**32
            made = theory.simulate(p, q, k, rounds=rounds, seed=seed, progress=progress(f"figure, K={k}"))
            points.append((theory.alpha(p, q), made.tokens_per_round))
        axes.plot(*zip(*points), marker, color=colour, markersize=5.5, markeredgecolor="white", markeredgewidth=0.7)
        axes.annotate(f"K = {k}", (1, k + 1), (6, -3), textcoords="offset points", color=colour, weight="bold")
    axes.plot([], [], color=GREY, label=r"$(1-\alpha^{K+1})\,/\,(1-\alpha)$")
    axes.plot([], [], "o", color=GREY, markeredgecolor="white", label=f"simulated, {rounds:,} rounds each")
    axes.set(
        xlabel=r"acceptance $\alpha = \Sigma_x\,\min(p(x),\,q(x))$", ylabel="tokens per target pass", xlim=(0, 1),
        ylim=(1, 9.2), yticks=range(1, 10), title="Rejection rule: tokens per target pass",
    )  # fmt: skip
    axes.legend(loc="upper left")


def bells(shift):
    """Two bell-shaped laws over 32 tokens, their centres ``shift`` apart."""
    tokens = np.arange(32)
    p, q = (np.exp(-((tokens - 15.5 - side * shift / 2) ** 2) / (2 * 2.5**2)) for side in (-1, 1))
    return p / p.sum(), q / q.sum()


def speed_up(axes, args, simulation):
    """Speed-up over K, the optimum marked."""
    costs = {"draft_cost": args.draft_cost, "verify_cost": args.verify_cost}
    best = [theory.best_k(a, **costs) for a in ACCEPTANCES]
    last = int(np.clip(1.6 * max(best), 20, 128))
    grid = np.arange(last + 1)
    for a, k, colour, marker in zip(ACCEPTANCES, best, (RED, GREEN, BLUE), "so^", strict=True):
        values = [theory.speed_up(a, int(n), **costs) for n in grid]
        axes.plot(grid, values, marker, color=colour, linestyle="-", markersize=3.5, clip_on=False)
        axes.plot(
            k, values[k], marker, color=colour, markersize=9, markeredgecolor=BLACK, markeredgewidth=1.2, clip_on=False
        )
        patch = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        bold = {"textcoords": "offset points", "color": colour, "weight": "bold"}
        axes.annotate(f"K = {k}: {values[k]:.2f}x", (k, values[k]), (0, -17), ha="center", bbox=patch, **bold)
        axes.annotate(rf"$\mathbf{{\alpha}}$ = {a:g}", (last, values[-1]), (8, -3), **bold)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("plain decoding", (last, 1), (0, 3), textcoords="offset points", ha="right", color=GREY, fontsize=9)
    axes.plot([], [], "o", color="white", markeredgecolor=BLACK, markeredgewidth=1.2, markersize=9, label="best K")
    verify = "" if args.verify_cost == 1 else f", verifying pass $v$ = {args.verify_cost:g}"
    axes.set(
        xlabel="draft tokens per round $K$", ylabel="speed-up over plain decoding (times)", xlim=(0, last),
        ylim=(0, 1.14 * max(theory.speed_up(a, k, **costs) for a, k in zip(ACCEPTANCES, best))),
        xticks=range(0, last + 1, max(1, -(-last // 10))),
        title=f"Speed-up at draft cost $c$ = {args.draft_cost:g} target steps{verify}",
    )  # fmt: skip
    axes.legend(loc="upper left")


def the_rule(axes, args, simulation):
    """q and p beside each other: what they share is kept, what p has more is drawn again."""
    p, q = np.asarray(args.p), np.asarray(args.q)
    overlap, ids, width = np.minimum(p, q), np.arange(p.size), 0.36
    left, right = ids - width / 2 - 0.01, ids + width / 2 + 0.01
    few = p.size <= 16  # more bars than that leave no room for letters
    bars = [axes.bar(where, overlap, width, color=BLUE) for where in (left, right)]
    more = q > overlap
    bars.append(
        axes.bar(
            left[more], (q - overlap)[more], width, overlap[more], color="white", edgecolor=GREY, hatch="////",
            linewidth=0.8,
        )
    )  # fmt: skip
    bars.append(axes.bar(right, p - overlap, width, overlap, color=ORANGE))
    emitted = axes.plot(right, simulation.law, "D", color="white", markeredgecolor=BLACK, markersize=5 if few else 2.5)
    for where, name, height in ((left, "q", q), (right, "p", np.maximum(p, simulation.law))) if few else ():
        for x, y in zip(where, height, strict=True):
            axes.annotate(name, (x, y), (0, 6), textcoords="offset points", ha="center", style="italic", color=BLACK)
    axes.set(
        xlabel="token id", ylabel="probability", xticks=ids if few else range(0, p.size, -(-p.size // 10)),
        ylim=(0, 1.12 * max(p.max(), q.max())),
        title=f"The rejection rule: $\\alpha$ = {overlap.sum():.3f} accepted, {1 - overlap.sum():.3f} drawn again",
    )  # fmt: skip
    axes.grid(axis="x", visible=False)
    axes.figure.legend(
        [*bars[1:], *emitted],
        [
            "min(p, q), the overlap: accepted", "max(q - p, 0): rejected", "max(p - q, 0), the residual: drawn instead",
            f"emitted by {args.rule}, {simulation.rounds:,} rounds",
        ],
        loc="outside lower center", ncols=2, fontsize=9,
    )  # fmt: skip


if __name__ == "__main__":
    main()
