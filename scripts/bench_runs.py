"""Decoding prompts in several ways by turns: what bench.py times, and the check that texts are equal."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from script_tools import measured

from specjax import loop, parity, request

PLAIN, SPECULATIVE, PEER = "plain", "speculative", "peer"
# A first difference is rounding where the target itself was this undecided between the two tokens.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}


class Law(NamedTuple):
    """How tokens are drawn."""

    temperature: float
    top_p: float

    def __str__(self) -> str:
        cut = f", top-p {self.top_p:g}" if self.temperature and self.top_p < 1 else ""
        return f"T={self.temperature:g}{cut}"


class Group(NamedTuple):
    """Prompts that are decoded together."""

    prompts: list[int]  # numbers of them, for seeds
    ids: list[list[int]]
    category: str  # "" where they are of several


class Run(NamedTuple):
    """One decoding of a group; seconds."""

    tokens: list[list[int]]  # new ones
    prefill: float
    decode: float  # behind the prefill
    wall: float  # of the whole call
    counts: Any = None  # row by row; None: not known


class Way(NamedTuple):
    """A configuration."""

    name: str
    kind: str  # PLAIN, SPECULATIVE or PEER
    dtype: str
    facts: dict[str, Any]  # drafter, rule, number of draft tokens, for the report
    run: Callable[..., Run]  # (group, law, warm) -> Run; warm: compile, and stop after a few tokens
    lm: Any = None
    drafter: Any = None
    rule: Any = None


class How(NamedTuple):
    """What all ways have in common."""

    max_new_tokens: int
    seed: int
    ignore_eos: bool = False


def ours(
    name: str, dtype: str, lm, drafter, rule: str | None, how: How, label: str = "", adaptive: bool = False
) -> Way:
    """Decoding with specjax; ``drafter`` None is plain."""
    facts = {} if drafter is None else {
        "drafter": label or name, "rule": rule, "num_draft_tokens": drafter.num_draft_tokens, "adaptive": adaptive,
    }  # fmt: skip

    def run(group: Group, law: Law, warm: bool = False) -> Run:
        return decode(make(lm, drafter, rule, group, law, how, adaptive), 2 if warm else None)

    return Way(name, PLAIN if drafter is None else SPECULATIVE, dtype, facts, run, lm, drafter, rule)


def make(
    lm, drafter, rule: str | None, group: Group, law: Law, how: How, adaptive: bool = False
) -> request.Request:
    made = request.make(
        lm, group.ids, drafter=drafter, rule=rule, max_new_tokens=how.max_new_tokens, temperature=law.temperature,
        top_p=law.top_p if law.temperature else 1.0, seed=[how.seed + i for i in group.prompts],
        eos_ids=[] if how.ignore_eos else None,
        adaptive=measured(lm, drafter, len(group.ids)) if adaptive else False,
    )  # fmt: skip
    if made is None or made.host is not None:
        raise ValueError("a drafter that drafts on the host has no rounds to be timed: leave it out")
    return made


def decode(made: request.Request, budget: int | None = None) -> Run:
    """What `specjax.generate` does with a request, with a clock between prefill and rounds."""
    limits = made.limits
    if budget is not None:
        limits = limits._replace(max_new_tokens=jnp.minimum(limits.max_new_tokens, budget))
    began = time.perf_counter()
    state = made._replace(limits=limits).start()
    jax.block_until_ready(state)
    filled = time.perf_counter()
    state, _ = loop.decode(made.program, made.weights, state, made.sampling, limits)
    text, counts = jax.device_get((state.text, state.counts))
    ended = time.perf_counter()
    tokens = [row[a:b].tolist() for row, a, b in zip(text.tokens, text.prompt_lengths, text.lengths, strict=True)]
    return Run(tokens, filled - began, ended - filled, ended - began, counts)


def groups(texts: Sequence[list[int]], categories: Sequence[str], batch: int) -> list[Group]:
    """Prompts of similar length together; the last group is filled up with the first of them again."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if batch > 1 else list(range(len(texts)))
    order += list(itertools.islice(itertools.cycle(order), -len(order) % batch))
    made = []
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        kinds = {categories[i] for i in chosen}
        made.append(Group(chosen, [texts[i] for i in chosen], kinds.pop() if len(kinds) == 1 else ""))
    return made


def cell(
    ways: Sequence[Way], every: Sequence[Group], law: Law, repeats: int, how: How,
    between: Callable[[], None] = lambda: None, saved: Callable[[dict], None] = lambda cell: None,
    tick: Callable[[str], None] = lambda text: None,
) -> dict:  # fmt: skip
    """Every way on every group by turns, a different one first each time.

    Args:
      between: called after each group.
      saved: is given what there is after each group.
      tick: is told what is done.

    Returns:
      "runs" of each way, a dict per group: "tokens" (new ones), "passes" of the target, seconds of each repeat
      ("prefill", "decode", "wall") and counts; "equality" of each way that promises the text of plain decoding.
    """
    found: dict[str, Any] = {
        "batch": len(every[0].ids), "temperature": law.temperature, "top_p": law.top_p,
        "groups": [{"prompts": group.prompts, "category": group.category,
                    "prompt_tokens": sum(map(len, group.ids))} for group in every],
        "ways": {way.name: {"kind": way.kind, "dtype": way.dtype, **way.facts, "runs": []} for way in ways},
        "complete": False,
    }  # fmt: skip
    turn = 0
    for number, group in enumerate(every):
        tick(f"{law}, prompts {number + 1}/{len(every)}")
        for way in ways:
            way.run(group, law, warm=True)
        runs: dict[str, list[Run]] = {way.name: [] for way in ways}
        for _ in range(repeats):
            for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
                runs[way.name].append(way.run(group, law))
            turn += 1
        for name, made in runs.items():
            found["ways"][name]["runs"].append(_facts(made))
        for way in ways:
            _compare(way, ways, runs, group, law, how, found["ways"][way.name])
        between()
        found["complete"] = number + 1 == len(every)
        saved(found)
    return found


def _facts(runs: list[Run]) -> dict:
    first = runs[0]
    facts: dict[str, Any] = {"tokens": sum(map(len, first.tokens))}
    facts |= {name: [getattr(run, name) for run in runs] for name in ("prefill", "decode", "wall")}
    if first.counts is not None:
        counts = first.counts
        facts |= {"passes": int(np.max(counts.rounds)), "rounds": int(np.sum(counts.rounds)),
                  "emitted": int(np.sum(counts.emitted)), "proposed": int(np.sum(counts.proposed)),
                  "judged_at": np.sum(counts.judged_at, axis=0).tolist(),
                  "accepted_at": np.sum(counts.accepted_at, axis=0).tolist()}  # fmt: skip
    return facts


# --- equal texts


def _compare(way: Way, ways: Sequence[Way], runs: dict, group: Group, law: Law, how: How, into: dict) -> None:
    """Against plain decoding with the same weights, where the rule promises its text; a peer's only when greedy."""
    plain = next((w for w in ways if w.kind == PLAIN and w.dtype == way.dtype), None)
    promised = law.temperature == 0 or (way.kind == SPECULATIVE and way.rule == "match")
    if plain is None or way.kind == PLAIN or not promised:
        return
    equal = into.setdefault("equality", {"texts": 0, "equal": 0, "parted": []})
    said, expected = runs[way.name][0].tokens, runs[plain.name][0].tokens
    for row, (a, b) in enumerate(zip(expected, said, strict=True)):
        equal["texts"] += 1
        if a == b:
            equal["equal"] += 1
            continue
        options = {"temperature": law.temperature, "top_p": law.top_p if law.temperature else 1.0}
        at = parity.divergence(plain.lm, group.ids[row], a, b, seed=how.seed + group.prompts[row], **options)
        assert at is not None
        equal["parted"].append({"prompt": group.prompts[row], "token": at.index, "margin": at.margin,
                                "near_tie": at.margin <= NEAR_TIE[way.dtype]})  # fmt: skip


def unequal(cells: Sequence[dict]) -> list[str]:
    """Sentences about texts of ours that are not plain decoding's, and not because of a near tie."""
    return [
        f"{name}, batch {found['batch']}, {Law(found['temperature'], found['top_p'])}: prompt {place['prompt']} parts "
        f"from plain decoding at token {place['token']}, where the target was decided by {place['margin']:.2e}"
        for found in cells
        for name, way in found["ways"].items()
        if way["kind"] == SPECULATIVE
        for place in way.get("equality", {"parted": []})["parted"]
        if not place["near_tie"]
    ]
