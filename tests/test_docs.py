"""The code on the pages of docs/ runs as it stands, and file and test names they mention exist."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LONGEST = 40  # lines of a worked example


def blocks(page):
    """Source of each ```python block of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def run(source, page, **names):
    scope = {"__name__": f"docs.{page}", **names}
    exec(compile(source, page, "exec"), scope)
    return scope


@pytest.fixture(scope="module")
def toy():
    """The model that docs/adding-a-model.md writes as two functions."""
    return run(blocks("adding-a-model.md")[0], "adding-a-model.md")


def test_a_drafter_in_under_forty_lines_keeps_the_text(toy, capsys):
    drafter, use = blocks("adding-a-drafter.md")
    assert drafter.count("\n") < LONGEST
    scope = run(drafter + use, "adding-a-drafter.md", lm=toy["lm"])
    tau, rate = (float(number) for number in capsys.readouterr().out.split())
    assert tau > 1 and rate > 0, "the drafter never guessed right: the example shows nothing"
    assert_exact_in_a_batch(toy["lm"], scope["drafter"])
    before = specjax.loop.compiled_programs()
    specjax.generate(toy["lm"], [[5, 9, 7, 5]], drafter=scope["bigram"](toy["lm"].model.vocab_size), max_new_tokens=40)
    assert specjax.loop.compiled_programs() == before, "equal drafters compile once"


def test_the_bigram_drafter_observes_in_order(toy):
    scope = run(blocks("adding-a-drafter.md")[0], "adding-a-drafter.md")
    state = scope["init"](6, (), 2, 16)
    for tokens, count in (([[1, 2, 1, 0], [3, 3, 0, 0]], [3, 2]), ([[3, 0, 0, 0], [4, 0, 0, 0]], [1, 0])):
        start = jnp.zeros(2, jnp.int32)  # this drafter does not look at it
        chunk = specjax.Committed(jnp.array(tokens), jnp.zeros((2, 4, 0)), jnp.array(count), start)
        state = scope["observe"]((), state, chunk)
    assert state.after.tolist() == [[-1, 3, 1, -1, -1, -1], [-1, -1, -1, 3, -1, -1]]
    assert state.last.tolist() == [3, 3]


def assert_exact_in_a_batch(lm, drafter):
    """Ragged rows and mixed temperatures under "match": the text of plain decoding."""
    prompts = [[1], [5, 9, 7, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
    options = {"max_new_tokens": [9, 17, 30], "temperature": [0.0, 1.0, 0.7], "seed": 4, "rule": "match"}
    plain = specjax.generate(lm, prompts, **options)
    assert specjax.generate(lm, prompts, drafter=drafter, **options).tokens == plain.tokens


@pytest.mark.parametrize("number", range(2))
def test_a_model_in_under_forty_lines_decodes_speculatively(number, capsys):
    source = blocks("adding-a-model.md")[number]
    assert source.count("\n") < LONGEST
    scope = run(source, "adding-a-model.md")
    assert float(capsys.readouterr().out) >= 1  # tau
    assert scope["out"].tokens == specjax.generate(scope["lm"], [[5, 9, 7]], max_new_tokens=40).tokens
    assert_cached_equals_uncached(scope["lm"])


def assert_cached_equals_uncached(lm):
    """Reading a text in windows gives the logits of reading it at once."""
    tokens = np.arange(12, dtype=np.int32)[None] * 7 % lm.model.vocab_size
    positions = np.arange(12, dtype=np.int32)[None]
    whole = lm.model.apply(lm.params, tokens, positions, None, lm.model.init_cache(1, 16))
    cache, parts = lm.model.init_cache(1, 16), []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        out = lm.model.apply(lm.params, tokens[:, start:stop], positions[:, start:stop], None, cache)
        cache = out.cache._replace(lengths=out.cache.lengths + (stop - start))
        parts.append(np.asarray(out.logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.logits, rtol=1e-5, atol=1e-4)
    last = lm.model.apply(lm.params, tokens, positions, None, lm.model.init_cache(1, 16), logits_at=np.array([11]))
    np.testing.assert_allclose(last.logits[:, 0], whole.logits[:, 11], rtol=1e-5, atol=1e-4)


REFERENCE = re.compile(r"`((?:tests|specjax)/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_files_and_tests_named_in_the_docs_exist(page):
    for file, name in REFERENCE.findall((DOCS / page).read_text()):
        assert (ROOT / file).exists(), f"{page} names {file}"
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{page} names {file}::{name}"
