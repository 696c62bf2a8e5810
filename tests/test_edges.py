"""The edges of the interface: each is defined, or refused with the argument, its value and the remedy."""

import math

import numpy as np
import pytest

import specjax
from specjax import drafters, loop
from tests.small import (
    BOS,
    BUDGET,
    EOS,
    PROMPTS,
    ToyTokenizer,
    V,
    dictated,
    position_lm,
    run,
    target,
)  # fmt: skip


def test_an_empty_prompt_is_the_begin_token_or_an_error():
    """"" and [] alike."""
    for prompts in ("", [""], [[]], [np.zeros(0, np.int32)]):
        assert run(prompts=prompts).tokens == run(prompts=[[BOS]]).tokens
    bare = target()._replace(tokenizer=ToyTokenizer(bos_id=None))
    for lm in (bare, target()._replace(tokenizer=None)):
        with pytest.raises(ValueError, match=r"prompt 1 is empty.*no begin token.*at least one token"):
            specjax.generate(lm, [[1], []])


def test_an_empty_batch_gives_an_empty_result_after_the_checks():
    """[]: nothing is computed; wrong options are still wrong."""
    out = specjax.generate(target(), [], drafter=drafters.ngram(3), logprobs=True)
    assert (out.texts, out.tokens, out.finish_reasons, out.logprobs, out.warped_logprobs) == ([], [], [], [], [])
    assert (out.stats.rounds, out.stats.tau, out.stats.per_position) == (0, None, [None] * 3)
    for wrong in ({"temperature": -1}, {"rule": "x"}, {"stop": ""}, {"seed": [1]}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            specjax.generate(target(), [], **wrong)


def test_no_budget_gives_no_tokens():
    """max_new_tokens=0, for generate, stream and one row of a batch."""
    out = run(max_new_tokens=[0] * 8)
    assert out.tokens == [[]] * 8 and out.texts == [""] * 8 and out.finish_reasons == ["length"] * 8
    stream = specjax.stream(target(), [1], max_new_tokens=0)
    assert list(stream) == [] and stream.result.finish_reasons == ["length"]


def test_a_model_without_tokenizer_speaks_ids():
    """texts is None; text in any direction is refused."""
    bare = target()._replace(tokenizer=None)
    out = specjax.generate(bare, [PROMPTS[0]], max_new_tokens=BUDGET)
    assert out.texts is None and out.tokens == run(prompts=[PROMPTS[0]]).tokens
    for call, match in (
        (lambda: specjax.generate(bare, ["ab"]), r"prompt 0 is text.*no tokenizer.*token ids"),
        (lambda: specjax.generate(bare, [[1]], stop="a"), r"stop='a'.*no tokenizer.*token sequences"),
        (lambda: specjax.stream(bare, [1]), r"no tokenizer.*generate"),
        (lambda: specjax.generate(bare, ["ab"], chat=True), r"no tokenizer"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


ALL = list(range(V))
REFUSED = [  # options, and what the message must say
    ({"prompts": [[1], [V]]}, rf"prompt 1.*{V}.*0\.\.{V - 1}"),
    ({"prompts": [[-1]]}, r"prompt 0.*-1.*0\.\."),
    ({"prompts": [[1.5]]}, r"prompt 0.*1\.5"),
    ({"prompts": [[True]]}, r"prompt 0.*True"),
    ({"prompts": [{"role": "user", "content": "a"}]}, r"messages.*chat=True"),
    ({"prompts": ["a"], "chat": True}, r"chat template.*chat=True"),
    ({"prompts": [[1]], "chat": True}, r"chat=True.*token ids.*messages"),
    ({"temperature": [1.0]}, r"temperature has shape \(1,\) for 2 prompts.*one per prompt"),
    ({"max_new_tokens": [1, 2, 3]}, r"max_new_tokens has shape \(3,\) for 2 prompts"),
    ({"top_k": [[1], [2]]}, r"top_k has shape \(2, 1\)"),
    ({"logit_bias": [{}]}, r"logit_bias has 1 entries for 2 prompts"),
    ({"banned_tokens": [[1]]}, r"banned_tokens has 1 entries for 2 prompts"),
    ({"seed": [1]}, r"seed=\[1\].*here 2"),
    ({"seed": -1}, r"seed=-1.*0\.\.2\*\*32 - 1"),
    ({"seed": 2**32 - 1}, r"seed=4294967295.*4294967296"),
    ({"seed": 1.5}, r"seed=1\.5.*whole number"),
    ({"seed": [1.0, 2.0]}, r"seed=\[1\.0, 2\.0\].*whole number"),
    ({"n": 2, "seed": [1, 2]}, r"seed.*here 4"),
    ({"n": 0}, r"n=0.*1 or more"),
    ({"n": 1.5}, r"n=1\.5.*whole"),
    ({"prefill_chunk": 0}, r"prefill_chunk=0"),
    ({"rule": "greedy"}, r"rule='greedy'.*\['block', 'match', 'rejection'\]"),
    ({"on_capacity": "cut"}, r"on_capacity='cut'.*'error' or 'truncate'"),
    ({"temperature": -1}, r"temperature=-1.*0 \(greedy\) or more"),
    ({"temperature": math.nan}, r"temperature=nan"),
    ({"temperature": math.inf}, r"temperature=inf"),
    ({"temperature": 1e39}, r"temperature=1e\+39"),
    ({"temperature": [0.5, -2.0]}, r"temperature=-2\.0 \(prompt 1\)"),
    ({"temperature": "hot"}, r"temperature='hot'.*number"),
    ({"temperature": None}, r"temperature=None"),
    ({"top_k": -1}, r"top_k=-1.*0 \(off\)"),
    ({"top_k": 1.5}, r"top_k=1\.5.*whole number"),
    ({"top_p": 0}, r"top_p=0.*over 0, at most 1"),
    ({"top_p": 1.1}, r"top_p=1\.1"),
    ({"top_p": 1e-60}, r"top_p=1e-60"),
    ({"min_p": 2}, r"min_p=2.*0 \(off\) to 1"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0.*over 0"),
    ({"presence_penalty": math.inf}, r"presence_penalty=inf.*finite"),
    ({"frequency_penalty": math.nan}, r"frequency_penalty=nan.*finite"),
    ({"min_new_tokens": -1}, r"min_new_tokens=-1"),
    ({"max_new_tokens": -1}, r"max_new_tokens=-1.*0 or more"),
    ({"max_new_tokens": 2**31}, r"max_new_tokens=2147483648.*2\*\*31"),
    ({"logit_bias": {V: 1.0}}, rf"logit_bias.*{V}.*0\.\."),
    ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]=inf.*-inf to ban"),
    ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]=nan"),
    ({"logit_bias": {1: 1e300}}, r"logit_bias\[1\]=1e\+300"),
    ({"banned_tokens": [V]}, rf"banned_tokens.*{V}"),
    ({"banned_tokens": ALL}, r"prompt 0.*banned_tokens.*no token"),
    ({"banned_tokens": [[], ALL]}, r"prompt 1.*banned_tokens.*no token"),
    ({"logit_bias": dict.fromkeys(ALL, -math.inf)}, r"logit_bias.*no token"),
    ({"logit_bias": dict.fromkeys(ALL, -1e300)}, r"logit_bias.*no token"),
    ({"banned_tokens": ALL[2:], "eos_ids": [0, 1], "min_new_tokens": 1}, r"min_new_tokens.*no token"),
    ({"eos_ids": [V]}, rf"eos_ids.*{V}"),
    ({"eos_ids": -1}, r"eos_ids.*-1"),
    ({"stop": ""}, r"stop.*empty string"),
    ({"stop": ["a", ""]}, r"stop.*empty string"),
    ({"stop": [[]]}, r"stop.*empty token sequence"),
    ({"stop": [5]}, r"stop.*5.*eos_ids"),
    ({"stop": [[V]]}, rf"stop.*{V}"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", REFUSED, ids=[str(options)[:60] for options, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_with_its_name_its_value_and_the_remedy(options, message):
    """Case 30 (every token banned) and the edges of the interface: ValueError before any compute."""
    before = loop.compiled_programs()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        specjax.generate(target(), **{"prompts": [[1], [2]], **options})
    assert loop.compiled_programs() == before


def test_a_stream_takes_one_prompt():
    """Several rows have no one text to print."""
    for prompt, options in (([[1], [2]], {}), (["a", "b"], {}), ([], {}), ([1], {"n": 2})):
        with pytest.raises(ValueError, match=r"one prompt.*generate"):
            specjax.stream(target(), prompt, **options)


def test_end_ids_are_left_out_of_the_text_and_kept_in_the_tokens():
    """Control tokens have no text."""
    lm = position_lm(dictated([2, 3, EOS], V), ToyTokenizer())
    out = specjax.generate(lm, [[2]], eos_ids=EOS)
    assert (out.tokens, out.texts) == ([[3, EOS]], ["b"])
