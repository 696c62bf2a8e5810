"""What a drafter is worth, by decoding with it: tau, alpha by depth and by kind of prompt, tokens per second.

Prompts are a JSONL file with "prompt", a string or token ids, in each line and, if there are kinds of them, "category".
Weights are arguments of the compiled programs: drafters of one configuration share them, so evaluations during training
compile once.
"""

import functools
import json
import os
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.generate import generate
from specjax.models.language_model import LanguageModel, checked
from specjax.static import show, whole
from specjax.stats import Counts, Stats
from specjax.types import Drafter

SPECULATIVE = "speculative"
SPLITS = ("all", "tune", "report")


class Prompt(NamedTuple):
    """One user turn, or the tokens of a text to continue."""

    text: str | list[int]
    category: str = "all"


class Evaluation(NamedTuple):
    """What decoding with a drafter showed at one temperature."""

    temperature: float
    tau: float | None  # emitted tokens per round, over all prompts
    macro: float  # mean of the categories' tau
    alpha: float | None  # accepted / judged
    acceptance_rate: float | None  # accepted / proposed
    per_position: list[float | None]  # alpha at depth 1, 2, ..
    categories: dict[str, dict[str, Any]]  # of each: "prompts" in it, "tau", .., "per_position", and what was timed
    emitted: int
    rounds: int
    same: int | None = None  # prompts with the plain text, of all; None: not compared, or not promised
    rates: dict[str, float] | None = None  # tokens per second, plain builds by name, and "speculative"; None: not timed
    ratio: float | None = None  # speculative over the fastest plain one
    decode_rates: dict[str, float] | None = None  # the same behind the first token: without the prompt's pass
    decode_ratio: float | None = None


class Times(NamedTuple):
    """How long ways to decode took, prompt by prompt."""

    tokens: dict[str, list[int]]  # new ones
    seconds: dict[str, list[float]]  # medians
    first: dict[str, list[float]]  # medians until the first token; {}: not measured


def read_prompts(path: str | os.PathLike, per_category: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, in order; the first ``per_category`` of each category.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is none; names it. A file without prompts.
    """
    if per_category is not None:
        whole("per_category", per_category, 1)
    found, kept = [], defaultdict(int)
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise ValueError(f"{path}, line {number}: needs an object with a 'prompt', a string or a list of token ids")
        category = entry.get("category", "all")
        if not isinstance(category, str):
            raise ValueError(f"{path}, line {number}: category={show(category)} must be a string")
        kept[category] += 1
        if per_category is None or kept[category] <= per_category:
            found.append(Prompt(prompt, category))
    if not found:
        raise ValueError(f"{path} has no prompt in it")
    return found


def part(prompts: Sequence[Prompt], split: str, per_category: int | None = None) -> list[Prompt]:
    """The same half of the prompts every time: what is chosen on one half is measured on the other.

    Args:
      prompts: all of them.
      split: "tune", the first half of each category, rounded down; "report", the rest of it; "all".
      per_category: at most so many of each category, the first of that half.

    Raises:
      ValueError: no such half; nothing in it.
    """
    if split not in SPLITS:
        raise ValueError(f"split={show(split)}: choose one of {', '.join(map(repr, SPLITS))}")
    limit = len(prompts) if per_category is None else whole("per_category", per_category, 1)
    names = [prompt.category for prompt in prompts]
    halves = {name: names.count(name) // 2 for name in names}
    seen, kept, found = defaultdict(int), defaultdict(int), []
    for prompt in prompts:
        name = prompt.category
        first = seen[name] < halves[name]
        seen[name] += 1
        if (split == "all" or first == (split == "tune")) and kept[name] < limit:
            kept[name] += 1
            found.append(prompt)
    if not found:
        raise ValueError(f"split={show(split)}: {len(prompts)} prompts have none in that half; give more, or 'all'")
    return found


def evaluate(
    target: LanguageModel, drafter: Drafter, prompts: Sequence[Prompt], *, max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0,), batch: int = 8, chat: bool | None = None, compare: bool = False,
    repeats: int = 0, first: bool = False, plain: Mapping[str, LanguageModel] | None = None, seed: int = 0,
    progress: Callable[[str], None] | None = None, **options: Any,
) -> list[Evaluation]:  # fmt: skip
    """Decodes prompts with a drafter.

    Args:
      target, drafter: as `specjax.generate` takes them.
      prompts: see `read_prompts`; `Prompt`s made by hand will do.
      max_new_tokens: per prompt.
      temperatures: one evaluation each.
      batch: prompts at a time when nothing is timed, on a mesh rounded up to a multiple of its ``data``. A drafter with
        shared pools may propose less alone.
      chat: apply the chat template to prompts that are strings; None: if there is one.
      compare: also decode without the drafter and count equal texts, where they must be (greedy, or rule "match").
      repeats: how often every prompt is timed, plain and speculative by turns, one at a time, prefill included, after a
        run that compiles; 0 times nothing. Rates are all tokens over the sum of the medians. Implies ``compare``.
      first: also time every way up to its first token, and take that off: rates of decoding alone.
      plain: targets to be timed without a drafter, by name: the same model in other types. None is the target itself.
      seed: prompt i is decoded with seed + i.
      progress: is told what is being done.
      **options: of `specjax.generate`: rule, top_p, ..

    Raises:
      ValueError: no prompts; anything `specjax.generate` refuses.
    """
    target = checked("target", target)
    for name, value, least in (("batch", batch, 1), ("repeats", repeats, 0), ("max_new_tokens", max_new_tokens, 1)):
        whole(name, value, least)
    if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise ValueError(f"prompts={show(prompts)}: give Prompts, at least one; read_prompts reads them")
    layout = target.model.layout
    batch += -batch % (1 if layout is None or not layout.rules.batch else layout.mesh.shape[layout.rules.batch])
    texts = [encode(target, prompt, chat) for prompt in prompts]
    seeds = [seed + number for number in range(len(texts))]
    rows = []
    for temperature in temperatures:
        how = {"max_new_tokens": max_new_tokens, "temperature": temperature, **options}
        said, counts = decode(target, texts, seeds, batch, drafter=drafter, progress=progress, **how)
        row = _summary(float(temperature), [prompt.category for prompt in prompts], counts)
        promised = temperature == 0 or (options.get("rule") or drafter.default_rule) == "match"
        if repeats:
            ways = [(name, lm, {}) for name, lm in ({"plain": target} if plain is None else plain).items()]
            ways.append((SPECULATIVE, target, {"drafter": drafter}))
            calls, begun = (
                {name: functools.partial(_alone, lm, texts, seeds, {**how, **extra, **cut}) for name, lm, extra in ways}
                for cut in ({}, {"max_new_tokens": 1})
            )
            times = timed(calls, len(texts), repeats, progress, begun if first else None)
            row = _with_speeds(row, times, [prompt.category for prompt in prompts])
        if (compare or repeats) and promised:
            expected, _ = decode(target, texts, seeds, batch, progress=progress, **how)
            row = row._replace(same=sum(a == b for a, b in zip(said, expected, strict=True)))
        rows.append(row)
    return rows


def encode(target: LanguageModel, prompt: Prompt, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt; ``chat`` as in `evaluate`."""
    if not isinstance(prompt.text, str):
        return [int(token) for token in prompt.text]
    if target.tokenizer is None:
        raise ValueError(f"prompt {show(prompt.text)} is text, but the target has no tokenizer: give token ids")
    if chat or (chat is None and target.chat_template is not None):
        return target.encode_chat(prompt.text)
    return target.tokenizer.encode(prompt.text)


def decode(
    target: LanguageModel, texts: Sequence[list[int]], seeds: Sequence[int], batch: int,
    progress: Callable[[str], None] | None = None, **options: Any,
) -> tuple[list[list[int]], Counts]:  # fmt: skip
    """New tokens of every text, and the counts row by row; texts of similar length share a batch."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    said: list[list[int]] = [[] for _ in texts]
    counts: list[Any] = [None for _ in texts]
    for start in range(0, len(order), batch):
        if progress is not None:
            progress(f"decoding prompt {start + 1}/{len(order)}")
        chosen = order[start : start + batch]
        padded = chosen + chosen[:1] * (batch - len(chosen))  # the same shapes for the last batch
        out = generate(target, [texts[i] for i in padded], seed=[seeds[i] for i in padded], **options)
        for row, i in enumerate(chosen):
            said[i] = out.tokens[row]
            counts[i] = jax.tree.map(lambda x, row=row: np.asarray(x)[row], out.stats.counts)
    return said, jax.tree.map(lambda *rows: np.stack(rows), *counts)


def timed(
    calls: Mapping[str, Callable[[int], list[int]]], count: int, repeats: int,
    progress: Callable[[str], None] | None = None, first: Mapping[str, Callable[[int], list[int]]] | None = None,
) -> Times:  # fmt: skip
    """Times ways to decode, which take turns on every prompt, after a run of each that compiles.

    Args:
      calls: prompt number -> new tokens.
      count: prompts.
      repeats: of which the median counts.
      progress: is told what is being done.
      first: the same ways, each ending with the first token; None: not timed.
    """
    found = Times({name: [] for name in calls}, {name: [] for name in calls}, {name: [] for name in first or {}})
    for number in range(count):
        if progress is not None:
            progress(f"timing prompt {number + 1}/{count}")
        for name, call in calls.items():
            found.tokens[name].append(len(call(number)))
        for call in (first or {}).values():
            call(number)
        whole_text, begun = defaultdict(list), defaultdict(list)
        for _ in range(repeats):
            for name, call in calls.items():
                whole_text[name].append(_seconds(call, number))
                if first is not None:
                    begun[name].append(_seconds(first[name], number))
        for into, times in ((found.seconds, whole_text), (found.first, begun)):
            for name, values in times.items():
                into[name].append(statistics.median(values))
    return found


def _seconds(call: Callable[[int], Any], number: int) -> float:
    began = time.perf_counter()
    call(number)
    return time.perf_counter() - began


def speeds(times: Times, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Tokens per second over prompts together, all tokens over the sum of the medians, and the ratio of the
    `SPECULATIVE` way to the fastest other one.

    Args:
      times: of every prompt.
      rows: prompts that count; None is all.

    Returns:
      "rates" and "ratio", and if first tokens were timed "decode_rates" and "decode_ratio", as in `Evaluation`; these
      are None where nothing is left to time.
    """
    rows = range(len(next(iter(times.tokens.values())))) if rows is None else rows

    def over(values):
        return {name: sum(row[i] for i in rows) for name, row in values.items()}

    tokens, seconds, first = over(times.tokens), over(times.seconds), over(times.first)
    rates = {name: tokens[name] / seconds[name] for name in tokens}
    found = {"rates": rates, "ratio": _ratio(rates)}
    if not first:
        return found
    left = {name: (tokens[name] - len(rows), seconds[name] - first[name]) for name in tokens}
    if any(min(pair) <= 0 for pair in left.values()):
        return {**found, "decode_rates": None, "decode_ratio": None}
    rates = {name: count / span for name, (count, span) in left.items()}
    return {**found, "decode_rates": rates, "decode_ratio": _ratio(rates)}


def _ratio(rates: Mapping[str, float]) -> float:
    return rates[SPECULATIVE] / max(rate for name, rate in rates.items() if name != SPECULATIVE)


def _with_speeds(row: Evaluation, times: Times, names: Sequence[str]) -> Evaluation:
    categories = {
        category: found | speeds(times, [i for i, name in enumerate(names) if name == category])
        for category, found in row.categories.items()
    }
    return row._replace(categories=categories, **speeds(times))


def _alone(lm: LanguageModel, texts: Sequence[list[int]], seeds: Sequence[int], options: Any, number: int) -> list[int]:
    return generate(lm, [texts[number]], seed=[seeds[number]], **options).tokens[0]


def _summary(temperature: float, names: Sequence[str], counts: Counts) -> Evaluation:
    def of(rows):
        stats = Stats(jax.tree.map(lambda x: x[rows], counts))
        return {name: getattr(stats, name) for name in ("tau", "alpha", "acceptance_rate", "per_position")}

    categories = {}
    for category in dict.fromkeys(names):
        rows = np.asarray([name == category for name in names])
        categories[category] = {"prompts": int(rows.sum()), **of(rows)}
    whole_set = Stats(counts)
    return Evaluation(
        temperature, macro=statistics.mean(part["tau"] or 0.0 for part in categories.values()), categories=categories,
        emitted=whole_set.emitted, rounds=whole_set.rounds, **of(np.ones(len(names), bool)),
    )  # fmt: skip


def table(rows: Mapping[str, Sequence[Evaluation]]) -> str:
    """Evaluations of drafters, by name, as a Markdown table: tau by category, mean over categories, alpha, rates."""
    every = [row for found in rows.values() for row in found]
    categories = list(dict.fromkeys(name for row in every for name in row.categories))
    timed_ways = list(dict.fromkeys(name for row in every for name in row.rates or {}))
    heads = ["drafter", "T", *categories, "tau, macro", "alpha", "alpha by depth", *(f"{n} tok/s" for n in timed_ways)]
    ratios = [name for name in ("ratio", "decode_ratio") if any(getattr(row, name) is not None for row in every)]
    lines = [[*heads, *(name.replace("_", " ") for name in ratios)]]
    for name, found in rows.items():
        for row in found:
            cells = [name, f"{row.temperature:g}"]
            cells += [_cell(row.categories.get(category, {}).get("tau")) for category in categories]
            cells += [f"**{row.macro:.2f}**", _cell(row.alpha), " ".join(map(_cell, row.per_position)) or "-"]
            cells += [_cell((row.rates or {}).get(speed), 1) for speed in timed_ways]
            lines.append(cells + [f"**{_cell(getattr(row, name))}**" for name in ratios])
    made = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([made[0], "|" + "---|" * len(lines[0]), *made[1:]])


def _cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
