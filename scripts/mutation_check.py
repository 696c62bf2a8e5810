"""Do the tests notice? Changes one line of the core at a time, in a copy, and runs the tests that should fail.

    python scripts/mutation_check.py            # all mutants, about ten minutes on two cores
    python scripts/mutation_check.py residual   # those whose description contains a word

A mutant that no test fails on is a hole in the tests: it is printed, and the exit status is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOINT = "tests/exactness/test_joint_law.py"
CHAIN, TREE, MODEL = (
    f"{JOINT}::test_five_tokens_follow_the_law_of_plain_decoding[rejection, {name}]"
    for name in ("chain", "siblings without replacement", "model")
)


class Mutant(NamedTuple):
    """One wrong line and the quick tests that must notice it."""

    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


JUDGING = ("tests/test_accept.py", "tests/test_accept_numerics.py")
WARP, ACCEPT, ROUND = ("tests/test_warp.py",), JUDGING, ("tests/test_round.py", CHAIN, TREE)
MUTANTS = [
    Mutant("repetition penalty upside down", "warp", "x > 0, x / repetition, x * repetition",
           "x > 0, x * repetition, x / repetition", WARP),
    Mutant("frequency counted once", "warp", "frequency * count.astype(jnp.float32)", "frequency", WARP),
    Mutant("the prompt counts as new tokens", "warp", "emitted + (text.lengths - text.prompt_lengths)[:, None]",
           "emitted + text.lengths[:, None]", WARP),
    Mutant("top-k keeps one more tie", "warp", "ties_k = k - size(keys > cut_k)", "ties_k = k + 1 - size(keys > cut_k)",
           WARP),
    Mutant("top-p drops the token that crosses", "warp", "jnp.clip(jnp.ceil(missing), 1, vocab)",
           "jnp.clip(jnp.floor(missing), 0, vocab)", WARP),
    Mutant("top-p sees what top-k removed", "warp",
           "wanted = p * (mass(keys > cut_k) + ties_k.astype(jnp.float32) * weight_at(cut_k))",
           "wanted = p * mass(keys >= low)", WARP),
    Mutant("logits not divided by the temperature", "warp", "(logits - top) / jnp.where(greedy, 1.0, temperature)",
           "(logits - top)", WARP),
    Mutant("u = 0 accepts what p forbids", "accept", "(u * _draft_mass(proposal) < _own_mass(target_probs, proposal))",
           "(u * _draft_mass(proposal) <= _own_mass(target_probs, proposal))", ACCEPT),
    Mutant("corrections drawn from p", "accept", "residual(law, _draft_law(proposal, judged, vocab))", "law", ACCEPT),
    Mutant("a residual without mass stays empty", "accept",
           "jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), p)", "rest / mass", ACCEPT),
    Mutant("accepted flags summed", "accept", "num_accepted = _leading(kept)",
           "num_accepted = jnp.sum(kept, axis=-1, dtype=jnp.int32)", ACCEPT),
    Mutant("siblings judged against the first law", "accept",
           "law = jnp.where((candidate & ~kept)[:, None], rest, law)", "pass", ACCEPT),
    Mutant("a node judged under the wrong parent", "accept", "(parents[:, node] + 1 == walk.last)",
           "(parents[:, node] + 1 <= walk.last)", ACCEPT),
    Mutant("block's correction not scaled", "accept", "rows.take(prefixes, num_accepted)[:, None] * law", "law",
           ACCEPT),
    Mutant("match draws every depth with one noise", "accept", "positions + depth + 1, rows.take",
           "positions + 1, rows.take", (f"{JOINT}::test_match_says_the_same_whatever_drafts",)),
    Mutant("accept and residual noise are the same bits", "accept", "at(keys, Role.RESIDUAL, positions)",
           "at(keys, Role.ACCEPT, positions)", (*ACCEPT, CHAIN)),
    Mutant("roles of neighbouring positions collide", "noise", "positions.astype(jnp.uint32) * len(Role) + role",
           "positions.astype(jnp.uint32) + role", (CHAIN, MODEL)),
    Mutant("the same noise in every round", "round", "accept(rule, state.keys, proposal, probs, pending_at)",
           "accept(rule, state.keys, proposal, probs)", (CHAIN,)),
    Mutant("penalties do not see the draft", "round", "seen if seen.ndim == 3 else seen[None])",
           "(seen if seen.ndim == 3 else seen[None]) & False)", (CHAIN,)),
    Mutant("tokens shifted by one", "round", "jnp.roll(path, -1, axis=1)", "path", ROUND),
    Mutant("positions by index", "round", "jnp.atleast_2d(tree.depths(proposal.parents, num_nodes))",
           "jnp.arange(1 + num_nodes)[None]", ROUND),
    Mutant("one committed entry too many", "cache", "lengths=cache.lengths + count)",
           "lengths=cache.lengths + count + 1)", ("tests/test_cache.py", *ROUND)),
    Mutant("a path not moved to the front", "cache", "slots = (cache.lengths[:, None] + path)[:, None, :, None]",
           "slots = (cache.lengths[:, None] + jnp.arange(path.shape[1])[None])[:, None, :, None]",
           ("tests/test_cache.py",)),
    Mutant("writes past the end are clamped", "cache", 'mode="drop", indices', 'mode="clip", indices',
           ("tests/test_cache.py",)),
]  # fmt: skip


def copy_tree(target: Path) -> None:
    """The library, its tests and nothing large; compiled programs are shared."""
    ignore = shutil.ignore_patterns("__pycache__", ".venv", ".git", "build", "dist", ".cache", "*.egg-info")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignore)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (target / ".cache").symlink_to(ROOT / ".cache")


def run_tests(root: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """(failed, the first failure) of a pytest run in ``root``, which comes first on the path."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 1, failures[0] if failures else ""


def main() -> int:
    """Runs the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only mutants whose description contains this")
    word = parser.parse_args().word
    chosen = [mutant for mutant in MUTANTS if word in mutant.what]
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "copy"
        copy_tree(root)
        for mutant in chosen:
            path = root / "specjax" / f"{mutant.file}.py"
            source = path.read_text()
            if source.count(mutant.right) != 1:
                raise SystemExit(f"{mutant.what}: {path.name} has {source.count(mutant.right)} of {mutant.right!r}")
            path.write_text(source.replace(mutant.right, mutant.wrong))
            start = time.monotonic()
            failed, first = run_tests(root, mutant.tests)
            path.write_text(source)
            if not failed:
                survivors.append(mutant.what)
            verdict = first.removeprefix("FAILED ") if failed else "SURVIVED"
            print(f"{time.monotonic() - start:5.0f} s  {mutant.file:7} {mutant.what}: {verdict}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
