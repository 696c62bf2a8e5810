"""Measured costs: the number of draft tokens they make best, when they are measured again, what is refused."""

import importlib
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters
from specjax.theory import CostModel, cost_model
from tests.small import V, draft_source, target

CHEAP = CostModel((0, 2, 4), (1.0, 1.1, 1.2), (0.0, 0.1, 0.2))
NAN, INF = math.nan, math.inf


def oracle_speeds(costs: CostModel, acceptance):
    """Tokens per time, term by term."""
    return [
        (1 + sum(np.prod(acceptance[: i + 1], dtype=np.float64) for i in range(size))) / (verify + draft)
        for size, verify, draft in zip(*costs)
    ]


def test_the_best_number_of_draft_tokens_is_that_of_the_most_expected_tokens_per_time():
    rng, best = np.random.default_rng(0), set()
    for _ in range(200):
        costs = CostModel((0, 1, 3, 8), *(tuple(np.cumsum(rng.uniform(0, top, 4)) + 0.01) for top in (0.6, 0.3)))
        acceptance = rng.uniform(0, 1, 8)
        expected = oracle_speeds(costs, acceptance)
        assert list(costs.tokens_per_second(acceptance).values()) == pytest.approx(expected)
        assert costs.best(acceptance) == costs.sizes[int(np.argmax(expected))]
        best.add(costs.best(acceptance))
    assert best == {0, 1, 3, 8}
    assert costs.tokens_per_second([0.5, None, 0.5]).keys() == {0, 1}  # beyond what was judged nothing is known
    assert CHEAP.seconds((0, 1, 3)) == pytest.approx((1.0, 1.1, 1.3))


def test_costs_are_measured_once_and_kept_by_what_they_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    costs = importlib.import_module("specjax.costs")
    calls, clock, told = [], itertools.count(), []

    def measure(lm, drafter, batch, sizes, progress):
        calls.append((batch, sizes))
        if progress is not None:
            progress(0, 2 * len(sizes))
        return CostModel(sizes, tuple(1.0 + size + next(clock) for size in sizes), tuple(0.5 for _ in sizes))

    monkeypatch.setattr(costs, "_measure", measure)
    first = cost_model(target(), draft_source("ngram", 4), sizes=(4, 2), progress=lambda *at: told.append(at))
    options = {"sizes": (0, 2, 4), "progress": lambda *at: told.append(at)}
    assert cost_model(target(), draft_source("ngram", 4), **options) == first and len(calls) == 1 == len(told)
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(json.dumps({"verify": [1.0], "draft": "?"}))  # half of something else
    again = cost_model(target(), draft_source("ngram", 4), sizes=(2, 4))
    assert again != first and cost_model(target(), draft_source("ngram", 4), sizes=(2, 4)) == again
    cost_model(target(), draft_source("ngram", 4), sizes=(2, 4), batch=2)
    cost_model(target(), draft_source("close", 4))
    half = target()._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target().params))
    cost_model(half, draft_source("ngram", 4), sizes=(2, 4))
    assert calls[2:] == [(2, (0, 2, 4)), (1, (0, 1, 2, 4)), (1, (0, 2, 4))]
    with pytest.raises(ValueError, match="costs"):
        first.seconds((5,))


# --- refusals


@pytest.mark.parametrize("costs, named", [
    (CHEAP._replace(sizes=()), r"costs\.sizes=\(\)"), (CHEAP._replace(sizes=(1, 2, 4)), r"costs\.sizes=\(1, 2, 4\)"),
    (CHEAP._replace(sizes=(0, 4, 2)), r"costs\.sizes=.*ascending"), (CHEAP._replace(sizes=(0, 2, 2)), r"costs\.sizes="),
    (CHEAP._replace(sizes=(0, 2.0, 4)), r"costs\.sizes="), (CHEAP._replace(sizes=("0", 2, 4)), r"costs\.sizes="),
    (CHEAP._replace(sizes=3), r"costs\.sizes=3"), (CHEAP._replace(sizes=None), r"costs\.sizes=None"),
    (CHEAP._replace(verify=(1.0, 1.1)), r"costs\.verify=.*3 times"), (CHEAP._replace(verify=1.0), r"costs\.verify=1.0"),
    (CHEAP._replace(draft="abc"), r"costs\.draft='abc'"), (CHEAP._replace(draft=None), r"costs\.draft=None"),
    *((CHEAP._replace(verify=(1.0, wrong, 1.2)), r"costs\.verify\[1\]=.*more than 0")
      for wrong in (0.0, -1.0, NAN, INF, "1", None, True, 10**400)),
    *((CHEAP._replace(draft=(0.0, 0.1, wrong)), r"costs\.draft\[2\]=.*0 or more")
      for wrong in (-1e-9, NAN, INF, "1", [1])),
])  # fmt: skip
def test_costs_that_are_no_times_are_refused_wherever_they_are_used(costs, named):
    for use in (lambda: costs.seconds((0,)), lambda: costs.tokens_per_second([0.5]), lambda: costs.best([0.5])):
        with pytest.raises(ValueError, match=f"^{named}"):
            use()


@pytest.mark.parametrize("acceptance, named", [
    (0.5, r"acceptance=0.5: give a list"), (None, "acceptance=None"), ("0.5", "acceptance='0.5'"),
    ([0.5, 1.5], r"acceptance\[1\]=1.5: must be a probability"), ([-0.1], r"acceptance\[0\]"),
    ([NAN], r"acceptance\[0\]"),
    (["a"], r"acceptance\[0\]='a'"), ([True], r"acceptance\[0\]=True"),
])  # fmt: skip
def test_acceptances_are_probabilities(acceptance, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        CHEAP.best(acceptance)


@pytest.mark.parametrize("sizes, named", [
    ((5,), "costs=.*0..4"), ((-1,), "sizes=-1"), ((1.5,), "sizes=1.5"), (("1",), "sizes='1'"),
    (3, "sizes=3: give a list"),
    (None, "sizes=None"), ((True,), "sizes=True"),
])  # fmt: skip
def test_numbers_of_draft_tokens_are_whole_and_measured(sizes, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        CHEAP.seconds(sizes)


def test_arrays_are_welcome_as_costs():
    same = CostModel(np.asarray(CHEAP.sizes), np.asarray(CHEAP.verify), list(CHEAP.draft))
    assert same.best(np.asarray([0.9] * 4)) == CHEAP.best([0.9] * 4) == 4
    assert same.seconds(np.arange(3)) == CHEAP.seconds((0, 1, 2))


@pytest.mark.parametrize("change, named", [
    ({"lm": "smollm2-135m-instruct"}, "lm='smollm2.*specjax.load"), ({"lm": None}, "lm=None"),
    ({"lm": target().model}, "lm=<Model>"),
    ({"drafter": None}, r"drafter=None: give a drafter such as specjax\.drafters"),
    ({"drafter": "ngram"}, "drafter='ngram'"), ({"drafter": drafters.ngram}, "drafter=ngram.*call it"),
    ({"drafter": target()}, r"drafter=LanguageModel.*drafters\.model"), ({"drafter": 4}, "drafter=4"),
    ({"drafter": drafters.ngram(4)._replace(vocab_size=V + 1)}, f"drafter was made for a target of {V + 1} tokens"),
    ({"drafter": drafters.host(lambda rows: [[1]] * len(rows), 4)}, "a drafter that drafts in Python"),
    *(({"batch": wrong}, "batch=.*1 or more") for wrong in (0, -1, 1.0, "1", None, True)),
    *(({"sizes": wrong}, "sizes=") for wrong in (3, "2", (9,), (-1,), (1.5,), ("2",), (None,), {2})),
    *(({"refresh": wrong}, "refresh=.*True or False") for wrong in (1, "yes", None)),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_by_name(change, named, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    options = {"lm": target(), "drafter": draft_source("ngram", 4), **change}
    with pytest.raises(ValueError, match=f"^{named}"):
        cost_model(**options)
    assert not list(tmp_path.iterdir())
