"""Drafting with a small model: which pairs are refused, and that both sides see the same law.

Its cache through rounds is tested in tests/test_round.py, its text in tests/test_generate.py.
"""

import functools

import jax
import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters
from tests.doubles import hash_lm
from tests.oracle.hashlm import HashConfig
from tests.small import PIECES, PROMPTS, ToyTokenizer, V, advance, begin, close, target


@functools.partial(jax.jit, static_argnums=0)
def draft3(draft, params, keys, state, text, sampling):
    return draft(params, keys, state, text, sampling, 3)


def test_another_vocabulary_size_is_refused_with_both_sizes():
    """Case 121, as far as it is offered: no silent padding."""
    draft = LanguageModel(*hash_lm(HashConfig(V + 2)))
    with pytest.raises(ValueError, match=rf"{V + 2} tokens.*{V}.*same vocabulary"):
        drafters.model(draft, target())


def test_the_same_size_with_other_tokens_is_refused_with_the_difference():
    """Cases 121 and 123: id 4 means another string."""
    swapped = [*PIECES[:4], PIECES[5], PIECES[4], *PIECES[6:]]
    draft = close()._replace(tokenizer=ToyTokenizer(swapped))
    with pytest.raises(ValueError, match=r"tokenizers differ \(id 4 is b' ' and b'ab'\)"):
        drafters.model(draft, target())
    drafters.model(draft._replace(tokenizer=None), target())  # ids only: nothing to compare


def test_a_shorter_context_is_refused_unless_texts_are_said_to_be_shorter():
    """Case 43: both lengths in the message."""
    def bounded(lm, context):
        return lm._replace(model=lm.model._replace(context_length=context))

    draft, lm = bounded(close(), 16), bounded(target(), 64)
    with pytest.raises(ValueError, match=r"context is 16.*64.*max_length=16"):
        drafters.model(draft, lm)
    with pytest.raises(ValueError, match=r"context is 16.*17"):
        drafters.model(draft, target(), max_length=17)
    drafter = drafters.model(draft, lm, max_length=16)
    with pytest.raises(ValueError, match=r"prompt 0 has 5 tokens and max_new_tokens is 12.*drafter's context is 16"):
        specjax.generate(lm, [[1] * 5], drafter=drafter, max_new_tokens=12)
    for fine in (bounded(close(), 64), bounded(close(), 65), close()):
        drafters.model(fine, lm)


def test_no_draft_tokens_are_refused():
    """Case 147."""
    with pytest.raises(ValueError, match=r"num_draft_tokens=0.*drafter=None"):
        drafters.model(close(), target(), 0)


def test_the_default_rule_follows_from_what_is_proposed():
    """Laws: rejection. A function of the context and the target's noise: match."""
    assert drafters.model(close(), target()).default_rule == "rejection"
    assert drafters.model(close(), target(), coupled=True).default_rule == "match"
    assert drafters.ngram().default_rule == specjax.plain().default_rule == "match"


def test_proposed_laws_are_the_warped_laws_the_tokens_were_drawn_from():
    """Case 1: the law in the proposal gives its token positive mass, sums to one and is cut by the same filters."""
    lm, drafter = target(), drafters.model(close(), target(), 3)
    sampling = specjax.make_sampling(3, V, temperature=[0.0, 1.0, 0.5], top_k=[0, 2, 3], banned_tokens=[3])
    state = begin(lm, PROMPTS[:3], drafter)
    proposal, _ = draft3(drafter.draft, drafter.params, state.keys, state.drafter, state.text, sampling)
    laws = np.asarray(proposal.probs)
    np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-5)
    assert ((laws > 0).sum(-1) <= np.array([[1], [2], [3]])).all() and not laws[..., 3].any()
    assert (np.take_along_axis(laws, np.asarray(proposal.tokens)[..., None], -1) > 0).all()


def test_drafting_never_rolls_back_what_was_committed():
    """Case 34: draft leaves the committed part of its cache alone, also when it is asked twice."""
    lm, drafter = target(), drafters.model(close(), target(), 3)
    state, _ = advance(lm, drafter, begin(lm, PROMPTS[:3], drafter))
    sampling = specjax.make_sampling(3, V)
    first, after = draft3(drafter.draft, drafter.params, state.keys, state.drafter, state.text, sampling)
    np.testing.assert_array_equal(after.cache.lengths, state.drafter.cache.lengths)
    second, _ = draft3(drafter.draft, drafter.params, state.keys, after, state.text, sampling)
    np.testing.assert_array_equal(first.tokens, second.tokens)
