"""What an engine refuses: settings and drafters when it is made, requests when they are inserted."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.static import bind
from tests.small import V, position_lm, target
from tests.test_engine import LONGEST, alone, drain, engine


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slots": 0}, r"slots=0: must be a whole number, 1 or more"),
        ({"slots": None}, r"slots=None"),
        ({"capacity": 2.5}, r"capacity=2\.5"),
        ({"max_eos_ids": 0}, r"max_eos_ids=0"),
        ({"max_biases": "3"}, r"max_biases='3'"),
        ({"lm": "smollm2"}, r"specjax\.load"),
        ({"lm": position_lm(np.zeros((64, V)), context_length=32)}, r"capacity=70: .* at most 32 tokens"),
        ({"drafter": drafters.host(lambda: list, 2)}, r"drafter runs Python between rounds.*drafters\.host"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        specjax.Engine(**{"lm": target(), "slots": 2, "capacity": LONGEST, **options})
    if "drafter" in options:
        with pytest.raises(ValueError, match=message):
            specjax.generate(target(), [[1]], slots=2, **options)


def _shared_state(params, batch, capacity):
    return {"pool": jnp.zeros(7), "rows": jnp.zeros((batch, 2))}


def test_a_drafter_whose_rows_share_state_is_refused():
    shared = drafters.ngram(3)._replace(init=bind(_shared_state))
    with pytest.raises(ValueError, match=r"drafter keeps an array of shape \(7,\).*use specjax\.generate"):
        specjax.Engine(target(), slots=2, capacity=LONGEST, drafter=shared)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([3], {"max_new_tokens": 70}, r"1 tokens and max_new_tokens is 70, but this engine holds texts of 70.*lower"),
        ([3] * 71, {"max_new_tokens": 1, "on_capacity": "truncate"}, r"shorten the prompt"),
        ([[3], [4]], {}, r"one prompt"), ([3], {"n": 2}, r"one sample"), ([], {}, r"one prompt"),
        ([3], {"eos_ids": range(9)}, r"9 eos_ids, but this engine has room for 8: make it with max_eos_ids=9"),
        ([3], {"stop": [[1]] * 5}, r"max_stop_sequences=5"), ([3], {"stop": [[1] * 9]}, r"max_stop_tokens=9"),
        ([3], {"banned_tokens": [5], "logit_bias": {4: 1.0, 6: 1.0}}, r"max_biases=3"),
        ([V], {}, r"prompt 0: 16 is not a token id"), ([3], {"temperature": -1}, r"temperature=-1"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_when_it_is_inserted(prompt, options, message):
    served = engine(max_biases=2)
    with pytest.raises(ValueError, match=message):
        served.insert(prompt, **{"max_new_tokens": 4, **options})
    assert (served.in_use, served.waiting, served.step()) == (0, 0, [])


@pytest.mark.parametrize("option", ["drafter", "rule", "logprobs", "prefill_chunk", "temprature", "slots"])
def test_an_option_that_is_the_engine_s_or_nobody_s_is_a_type_error(option):
    with pytest.raises(TypeError, match=option):
        engine().insert([3], **{option: None})


def test_a_budget_is_cut_to_the_capacity_if_asked():
    served = engine()
    id = served.insert([3] * 68, max_new_tokens=9, on_capacity="truncate")
    assert repr(served) == "Engine(0 of 4 slots in use, 1 waiting, capacity 70)"
    result = drain(served)[id]
    assert result.finish_reasons == ["capacity"] and result.tokens == alone([3] * 68, max_new_tokens=2).tokens
