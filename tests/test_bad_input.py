"""First mistakes: refused before any compute, by the name of the argument and with the remedy; arrays are welcome."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, load, loop
from specjax.models import chat
from specjax.static import whole
from tests.small import PROMPTS, V, padded, run, target

HUGE = 10**400
CHAT = target()._replace(chat_template="{{ messages[0].content }}")
MODEL = target().model

NOT_COUNTS = [True, False, 2.0, np.float32(2), None, "2", [2], np.array([2]), 0, -1, np.int64(0), HUGE * -1]


@pytest.mark.parametrize("value", NOT_COUNTS, ids=lambda value: f"{type(value).__name__} {value}"[:20])
def test_counts_are_whole_numbers(value):
    """At construction: num_draft_tokens, max_ngram, min_ngram, max_length, n, prefill_chunk, vocab_size."""
    calls = {
        "num_draft_tokens": [lambda: drafters.ngram(value), lambda: drafters.model(target(), target(), value)],
        "max_ngram": [lambda: drafters.ngram(max_ngram=value)],
        "min_ngram": [lambda: drafters.ngram(min_ngram=value)],
        "n": [lambda: specjax.generate(target(), [[1]], n=value)],
        "vocab_size": [lambda: specjax.make_sampling(1, value)],
    }
    if value is not None:  # the target's context; by the capacity
        calls["prefill_chunk"] = [lambda: specjax.generate(target(), [[1]], prefill_chunk=value)]
        calls["max_length"] = [lambda: drafters.model(target(), target(), max_length=value)]
    if not (isinstance(value, (int, np.integer)) and value == 0) or value is False:  # an empty batch is one
        calls["batch"] = [lambda: specjax.make_sampling(value, V)]
    for name, each in calls.items():
        for call in each:
            with pytest.raises(ValueError, match=rf"^{name}=.*whole number, [01] or more") as caught:
                call()
            assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", NOT_COUNTS, ids=lambda value: f"{type(value).__name__} {value}"[:20])
def test_a_prefill_chunk_is_a_whole_number(value):
    """specjax.prefill, for people who build their own loop."""
    lm, text = target(), padded([[1, 2]])
    with pytest.raises(ValueError, match=r"^chunk=.*whole number, 1 or more"):
        specjax.prefill(lm.model, lm.params, specjax.plain(), text, specjax.row_keys([0]), chunk=value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (jax.random.split(jax.random.key(0, impl="rbg"), 1), r"key<rbg>.*threefry"),
        (jnp.zeros((1, 2), jnp.uint32), r"dtype uint32.*threefry"),
        ([0], r"keys is a list.*row_keys"),
        (None, r"keys is a NoneType.*row_keys"),
    ],
    ids=["rbg", "raw", "list", "None"],
)
def test_prefill_takes_the_keys_that_rounds_take(keys, message):
    """Said before the first chunk is read, not by the first round."""
    lm = target()
    with pytest.raises(ValueError, match=message):
        specjax.prefill(lm.model, lm.params, specjax.plain(), padded([[1, 2]]), keys)


SEEDS = [
    (3, r"^seeds=3: give a list.*\[3\]"), (np.int64(3), r"^seeds=.*3.*give a list"), (jnp.int32(3), r"^seeds=.*list"),
    (None, r"^seeds=None: give a list"), ("12", r"^seeds='12': give a list"), (1.5, r"^seeds=1\.5: give a list"),
    ([1, -1], r"^seeds\[1\]=-1: must be"), ([1.0], r"^seeds\[0\]=1\.0: must be"),
    ([2**32], r"^seeds\[0\]=4294967296: .*below 2\*\*32"), ([True], r"^seeds\[0\]=True: must be"),
    ([0, HUGE], r"^seeds\[1\]=1000.*below"), (np.array([0, -7]), r"^seeds\[1\]=.*-7.*must be"),
    (np.array([0.5]), r"^seeds\[0\]=.*0\.5.*must be"), (np.array([2**40]), r"^seeds\[0\]=.*1099511627776.*below"),
    ([[1, 2]], r"^seeds\[0\]=\[1, 2\]: must be"), (np.array([[1, 2]]), r"^seeds\[0\]=.*must be"),
    (np.array([True]), r"^seeds\[0\]=.*True.*must be"),
    (jax.random.split(jax.random.key(0)), r"(?s)^seeds\[0\]=.*must be"),
]  # fmt: skip


@pytest.mark.parametrize("seeds, message", SEEDS, ids=range(len(SEEDS)))
def test_row_keys_need_one_seed_per_row(seeds, message):
    """Nothing wraps around to another seed."""
    with pytest.raises(ValueError, match=message) as caught:
        specjax.row_keys(seeds)
    assert len(str(caught.value)) < 250


def test_row_keys_take_any_list_of_seeds():
    """Ranges, numpy and JAX; none at all."""
    expected = jax.random.key_data(specjax.row_keys([0, 1, 2]))
    for same in (range(3), (0, 1, 2), np.arange(3), jnp.arange(3), np.arange(3, dtype=np.uint8), [*jnp.arange(3)]):
        np.testing.assert_array_equal(jax.random.key_data(specjax.row_keys(same)), expected)
    assert specjax.row_keys([]).shape == (0,) and specjax.row_keys([2**32 - 1]).shape == (1,)


def test_counts_may_be_of_any_integer_type():
    """Python, numpy and JAX; what is kept is an int, so equal drafters stay equal."""
    for value in (3, np.int32(3), np.array(3), jnp.int32(3), np.uint8(3)):
        assert whole("x", value, 1) == 3 and type(whole("x", value, 1)) is int
        assert drafters.ngram(value, max_ngram=value, min_ngram=value) == drafters.ngram(3, max_ngram=3, min_ngram=3)
        assert type(drafters.model(target(), target(), value, max_length=value).num_draft_tokens) is int


VALUES = [  # options of generate, and what the message must say
    ({"prompts": b"ab"}, r"prompts=b'ab' is bytes.*decode"),
    ({"prompts": [b"ab"]}, r"prompt 0 is bytes.*decode"),
    ({"prompts": 5}, r"prompts=5: give a string"),
    ({"prompts": None}, r"prompts=None: give"),
    ({"prompts": np.array(5)}, r"prompts=5: give a string"),
    ({"prompts": {5}}, r"prompts=\{5\}: give"),
    ({"prompts": [{5}]}, r"prompt 0 is \{5\}: give"),
    ({"prompts": [None]}, r"prompt 0 is None: give"),
    ({"prompts": jnp.array([5.0, 9.0])}, r"prompt 0 is 5\.0"),
    ({"prompts": [jnp.array([5.0])]}, r"prompt 0: 5\.0 is not a token id"),
    ({"prompts": "a\ud800"}, r"prompt 0: character 1 .*surrogate.*replace"),
    ({"prompts": "a\ud800", "chat": True}, r"prompt 0: character 1 .*surrogate.*replace"),
    ({"prompts": [{"role": "user"}], "chat": True}, r"prompt 0: message 0 has no 'content'"),
    ({"prompts": [{"content": "a"}], "chat": True}, r"prompt 0: message 0 has no 'role'"),
    ({"prompts": [{"role": "user", "content": 5}], "chat": True}, r"message 0 has 'content' 5.*string"),
    ({"prompts": [{"role": None, "content": "a"}], "chat": True}, r"message 0 has 'role' None.*string"),
    ({"drafter": "ngram"}, r"drafter='ngram': give a drafter such as specjax\.drafters\.ngram\(\)"),
    ({"drafter": drafters.ngram}, r"drafter=ngram: .*function: call it.*specjax\.drafters\.ngram\("),
    ({"drafter": target()}, r"drafter=LanguageModel.*specjax\.drafters\.model\("),
    ({"drafter": False}, r"drafter=False: give a drafter"),
    ({"drafter": drafters.ngram(10**6)}, r"drafter.*num_draft_tokens=1000000.*at most"),
    ({"lm": "name"}, r"lm='name'.*specjax\.load\('name'\)"),
    ({"lm": None}, r"lm=None.*specjax\.load"),
    ({"lm": MODEL}, r"lm=<Model>.*LanguageModel\(model, params\)"),
    ({"lm": target()._replace(model=MODEL._replace(context_length=8)), "drafter": drafters.ngram(9)},
     r"num_draft_tokens=9.*8 tokens.*fewer"),
    ({"prefill_chunk": 10**9}, r"prefill_chunk=1000000000: must be at most"),
    ({"rule": ["match"]}, r"rule=\['match'\]: choose one of"),
    ({"on_capacity": ["error"]}, r"on_capacity=\['error'\]: choose"),
    ({"chat": "no"}, r"chat='no': must be True or False"),
    ({"logprobs": "x"}, r"logprobs='x': must be True or False"),
    ({"eos_ids": 5.0}, r"eos_ids=5\.0: give a token id"),
    ({"eos_ids": "</s>"}, r"eos_ids='</s>': give a token id"),
    ({"eos_ids": [None]}, r"eos_ids: None is not a token id"),
    ({"stop": 5.0}, r"stop=5\.0: give a string"),
    ({"stop": [None]}, r"stop contains None"),
    ({"stop": b"a"}, r"stop=b'a'"),
    ({"stop": [b"a"]}, r"stop contains b'a'"),
    ({"stop": np.array([1, 2])}, r"stop contains the number 1"),
    ({"banned_tokens": 5}, r"banned_tokens=5: give a list"),
    ({"banned_tokens": {5}}, r"banned_tokens=\{5\}: give a list"),
    ({"banned_tokens": (i for i in [5])}, r"banned_tokens=<generator.*give a list"),
    ({"banned_tokens": [5.0]}, r"banned_tokens: 5\.0 is not a token id"),
    ({"banned_tokens": [None]}, r"banned_tokens: None is not a token id"),
    ({"banned_tokens": [[1], None]}, r"banned_tokens=\[\[1\], None\]"),
    ({"logit_bias": 5}, r"logit_bias=5: give a dict"),
    ({"logit_bias": "x"}, r"logit_bias='x': give a dict"),
    ({"logit_bias": [(5, 1)]}, r"logit_bias=\[\(5, 1\)\]: give a dict"),
    ({"logit_bias": {5: "x"}}, r"logit_bias\[5\]='x'.*finite number"),
    ({"logit_bias": {5: HUGE}}, r"logit_bias\[5\]=1000.*finite number"),
    ({"logit_bias": {"5": 1}}, r"logit_bias: '5' is not a token id"),
    ({"temperature": [[1], [1, 2]]}, r"temperature=\[\[1\], \[1, 2\]\]: give one value"),
    ({"temperature": HUGE}, r"temperature=1000.*finite"),
    ({"temperature": 10**5000}, r"temperature=.*finite"),
    ({"temperature": math.inf}, r"temperature=inf: must be finite"),
    ({"temperature": math.nan}, r"temperature=nan: must be finite"),
    ({"temperature": jax.random.key(0)}, r"temperature="),
    ({"temperature": [True]}, r"temperature=\[True\]: give a number, or one per prompt"),
    ({"prompts": [[1], [2]], "temperature": [0.5, True]}, r"temperature=\[0\.5, True\]: give a number"),
    ({"prompts": [[1], [2]], "top_k": [False, 3]}, r"top_k=\[False, 3\]: give a number"),
    ({"prompts": [[1], [2]], "max_new_tokens": [4, True]}, r"max_new_tokens=\[4, True\]: give a number"),
    ({"max_new_tokens": HUGE}, r"max_new_tokens=1000"),
    ({"seed": jax.random.key(0)}, r"seed=a JAX key.*int"),
    ({"seed": None}, r"seed=None"),
    ({"seed": True}, r"seed=True"),
    ({"seed": HUGE}, r"seed=1000"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", VALUES, ids=[f"{next(iter(o))}-{i}" for i, (o, _) in enumerate(VALUES)])
def test_a_value_that_cannot_be_meant_is_refused(options, message):
    """ValueError with name, value and remedy, in a few lines at most."""
    before = loop.compiled_programs()
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        specjax.generate(**{"lm": CHAT, "prompts": [[1]], **options})
    assert len(str(caught.value)) < 500
    assert loop.compiled_programs() == before


NAMES = {
    "temprature": "temperature", "max_tokens": "max_new_tokens", "seeds": "seed", "max_new_token": "max_new_tokens",
    "topk": "top_k", "drafters": "drafter", "num_return_sequences": "n", "eos_id": "eos_ids",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_names_the_one_that_was_meant(name):
    """TypeError, for generate and stream."""
    for call in (specjax.generate, specjax.stream):
        with pytest.raises(TypeError, match=rf"no option '{name}'; did you mean '{NAMES[name]}'\?"):
            call(target(), [1], **{name: 1})
    with pytest.raises(TypeError, match=r"no option 'qqqq'$"):
        specjax.generate(target(), [1], qqqq=1)


def test_a_draft_model_needs_two_language_models():
    """Names, models without weights and None are refused, whichever it is."""
    for wrong, remedy in (("name", r"specjax\.load"), (MODEL, r"LanguageModel\(model, params\)"), (None, r"load")):
        with pytest.raises(ValueError, match=rf"draft=.*{remedy}"):
            drafters.model(wrong, target())
        with pytest.raises(ValueError, match=rf"target=.*{remedy}"):
            drafters.model(target(), wrong)
    with pytest.raises(ValueError, match=r"coupled='yes'"):
        drafters.model(target(), target(), coupled="yes")


def test_arrays_are_welcome():
    """Token ids, seeds and biases as numpy or JAX arrays are what they are as lists."""
    prompt = PROMPTS[0]
    expected = run(prompts=[prompt]).tokens
    for same in (jnp.array(prompt), np.array(prompt), [jnp.array(prompt)], jnp.array([prompt]), [*jnp.array(prompt)]):
        assert run(prompts=same).tokens == expected
    options = {"eos_ids": [3], "stop": [[5, 5]], "banned_tokens": [2], "logit_bias": {5: 1.0}, "seed": 3}
    arrays = {
        "eos_ids": jnp.array([3]), "stop": [jnp.array([5, 5])], "banned_tokens": jnp.array([2]),
        "logit_bias": {5: jnp.float32(1)}, "seed": jnp.int32(3),
    }  # fmt: skip
    expected = run(prompts=[prompt], temperature=1.0, **options).tokens
    assert run(prompts=[prompt], temperature=jnp.float32(1), **arrays).tokens == expected
    assert run(prompts=[prompt], temperature=1.0, **{**options, "seed": np.array(3)}).tokens == expected


def test_none_bans_nothing_and_ends_nothing():
    """make_sampling(banned_tokens=None, eos_ids=None)."""
    for given, empty in zip(
        specjax.make_sampling(2, V, banned_tokens=None, eos_ids=None), specjax.make_sampling(2, V), strict=True
    ):
        np.testing.assert_array_equal(given, empty)


def test_only_a_message_with_tool_calls_may_lack_content():
    """What templates of tools read."""
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert chat.messages_of([call]) == [call]
    with pytest.raises(ValueError, match=r"message 0 has no 'content'"):
        chat.messages_of({"role": "assistant"})
    with pytest.raises(ValueError, match=r"message 1 is 5"):
        chat.messages_of([call, 5])


def test_a_language_model_prints_in_a_few_words():
    """Not its weights."""
    text = repr(target())
    assert len(text) < 300 and "\n" not in text
    for part in (f"{V} tokens", "parameters", "float32", "ToyTokenizer", "eos_ids=()"):
        assert part in text


def test_load_says_what_was_meant(tmp_path, monkeypatch):
    """Empty and missing names, other spellings, paths that must not reach the hub, dtypes."""
    monkeypatch.setattr(specjax.models.huggingface, "download", lambda name: pytest.fail(f"asked the hub for {name}"))
    monkeypatch.chdir(tmp_path)
    for wrong in ("", None, 5):
        with pytest.raises(ValueError, match=r"name_or_path=.*smollm2-135m-instruct"):
            load(wrong)
    with pytest.raises(FileNotFoundError, match=r"did you mean 'smollm2-135m-instruct'\?"):
        load("SmolLM2-135M-Instruct")
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a directory"):
        load(type(tmp_path)("org/name"))
    for wrong in (None, 32):
        with pytest.raises(ValueError, match=rf"dtype is {wrong}.*'float32' or 'bfloat16'"):
            load("x", dtype=wrong)
