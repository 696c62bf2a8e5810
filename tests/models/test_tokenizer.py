"""Tokenizers from tokenizer.json and from GGUF metadata."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specjax.models import tokenizer
from specjax.models.tokenizer import Tokenizer
from tests.models.tiny import DATA, METADATA, VOCAB, WORDS

REFERENCE = json.loads((DATA / "smollm2_135m_instruct_tokenizer.json").read_text())


@pytest.mark.parametrize("case", REFERENCE, ids=range(len(REFERENCE)))
def test_smollm2_ids_equal_the_reference(smollm2, case):
    assert smollm2.tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert smollm2.tokenizer.encode(case["text"]) == case["ids_default"]
    assert smollm2.tokenizer.decode(case["ids"]) == case["text"]


def test_smollm2_token_bytes_joined_are_the_text(smollm2):
    for case in REFERENCE:
        joined = b"".join(smollm2.tokenizer.token_bytes(token) for token in case["ids"])
        assert joined.decode() == case["text"]


def test_smollm2_knows_its_tokens(smollm2):
    text = smollm2.tokenizer
    assert (text.vocab_size, text.bos_token, text.eos_token) == (49152, "<|im_start|>", "<|im_end|>")
    assert text.special_ids == set(range(17))
    assert smollm2.eos_ids == (2,)


def from_metadata(**changes):
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None}, "x.gguf")


def test_merges_apply_and_special_tokens_are_cut_out_first():
    text = from_metadata()
    assert [text.tokens[i] for i in text.encode("ab a<|stop|>12")] == ["ab", "Ġa", "<|stop|>", "1", "2"]
    assert text.decode(text.encode("ab a<|stop|>12")) == "ab a<|stop|>12"
    assert text.decode(text.encode("ab<|stop|>"), skip_special_tokens=True) == "ab"


def test_user_defined_tokens_are_cut_out_but_stay_visible():
    types = [3, 3, 4] + [1] * (VOCAB - 3)
    text = from_metadata(token_type=types)
    assert text.encode("a<|stop|>") == [3, 2]
    assert text.decode([3, 2], skip_special_tokens=True) == "a<|stop|>"
    assert text.special_ids == {0, 1}


@pytest.mark.parametrize(("flag", "ids"), [(None, [3]), (False, [3]), (True, [1, 3])])
def test_bos_is_added_as_the_metadata_says(flag, ids):
    text = from_metadata(add_bos_token=flag)
    assert text.encode("a") == ids
    assert text.encode("a", add_special_tokens=False) == [3]
    assert text.encode("") == ids[:-1]


def test_eos_is_added_as_the_metadata_says():
    assert from_metadata(add_eos_token=True).encode("a") == [3, 2]


def test_llama3_pre_tokenizer_adds_bos_and_groups_digits_by_three():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["<|end|>", "<|user|>", "<|stop|>", *sorted(alphabet), "12", "123", "Ġa"]
    text = from_metadata(pre="llama-bpe", tokens=words, token_type=[3] * 3 + [1] * (len(words) - 3),
                         merges=["1 2", "12 3", "Ġ a"])
    assert [text.tokens[i] for i in text.encode("1234 a's\n\n")] == ["<|user|>", "123", "4", "Ġa", "'", "s", "Ċ", "Ċ"]


def test_qwens_pre_tokenizer_cuts_digits_apart_and_composes_accents():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["<|end|>", "<|user|>", "<|stop|>", *sorted(alphabet), "12", "Ã©"]
    changes = {"tokens": words, "token_type": [3] * 3 + [1] * (len(words) - 3), "merges": ["1 2", "Ã ©"]}
    text = from_metadata(pre="qwen2", **changes)
    assert [text.tokens[i] for i in text.encode("12e\u0301")] == ["1", "2", "Ã©"]
    for pre in ("smaug-bpe", "dbrx"):
        assert [text.tokens[i] for i in from_metadata(pre=pre, **changes).encode("12")] == ["12"]


# --- SentencePiece

SPM = ["<unk>", "<s>", "</s>", "[INST]", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b",
       "ab", "\u2581a", "ba", "\u2581ab"]  # fmt: skip
SPM_TYPES = [2, 3, 3, 4, 4, *[6] * 256, *[1] * 7]


def spm(**changes):
    scores = [*[0.0] * 264, -2.0, -1.0, -3.0, -4.0]  # ab, _a, ba, _ab
    metadata = {"model": "llama", "tokens": SPM, "token_type": SPM_TYPES, "scores": scores, "merges": None, "pre": None}
    return from_metadata(**metadata | changes)


def test_pieces_are_joined_by_score_and_not_by_place():
    text = spm(add_bos_token=False, add_space_prefix=False)

    def pieces(string):
        return [text.tokens[i] for i in text.encode(string)]

    assert pieces("ab") == ["ab"] and pieces("bab") == ["b", "ab"]
    assert pieces(" aba") == ["\u2581a", "ba"]  # _a is better than ab, then ba than _ab
    assert pieces("a[INST]b\n\na") == ["a", "[INST]", "b", "\n\n", "a"]
    assert pieces("é") == ["<0xC3>", "<0xA9>"] and text.decode(text.encode("aé b")) == "aé b"


def test_a_text_begins_with_bos_and_a_space_unless_the_metadata_says_otherwise():
    text = spm()
    assert [text.tokens[i] for i in text.encode("ab")] == ["<s>", "\u2581ab"]
    assert text.decode(text.encode("ab"), skip_special_tokens=True) == "ab"
    assert spm(add_space_prefix=False).encode("ab") == [1, SPM.index("ab")]
    assert spm(add_bos_token=False, add_space_prefix=False).encode("ab") == [SPM.index("ab")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "t5"}, "tokenizer model 't5'"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 entries in tokenizer.ggml.scores"),
        ({"pre": "mystery"}, "'mystery'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a zz"]}, "merges do not fit"),
        ({"tokens": ["a", *WORDS[1:]]}, "'a' occurs twice"),
        ({"eos_token_id": 99}, "eos_token_id is 99"),
        ({"token_type": [1]}, "1 entries in tokenizer.ggml.token_type"),
    ],
)
def test_metadata_that_is_not_understood_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        from_metadata(**changes)


def test_fingerprints_are_equal_exactly_when_every_id_means_the_same_string():
    text = from_metadata()
    assert text.fingerprint == from_metadata(add_bos_token=True, merges=["Ġ a"]).fingerprint
    assert text.difference(from_metadata()) is None
    renamed = from_metadata(tokens=[*WORDS[:-1], "ZZ"])
    assert text.fingerprint != renamed.fingerprint
    assert text.difference(renamed) == f"token {VOCAB - 1} is '8' in one and 'ZZ' in the other"
    longer = from_metadata(tokens=[*WORDS, "ZZ"], token_type=[1] * (VOCAB + 1))
    assert text.difference(longer) == f"one has {VOCAB} tokens, the other {VOCAB + 1}"


def byte_fallback_backend():
    """A SentencePiece-like vocabulary: spaces are U+2581, unknown characters are bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_bytes_of_a_sentencepiece_vocabulary():
    text = Tokenizer(byte_fallback_backend(), bos_id=1, eos_id=2)
    ids = text.encode("\u2581aé", add_special_tokens=False)
    assert b"".join(map(text.token_bytes, ids)).decode() == text.decode(ids) == " aé"
    assert text.token_bytes(2) == b"</s>"


def write(path, backend, **settings):
    (path / "tokenizer.json").write_text(backend.to_str())
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))


def test_tokenizer_json_adds_what_its_post_processor_adds(tmp_path):
    write(tmp_path, byte_fallback_backend(), bos_token="<s>", eos_token={"content": "</s>"})
    text = tokenizer.from_directory(tmp_path)
    assert text.encode("a") == [1, text.tokens.index("a")]
    assert (text.bos_id, text.eos_id) == (1, 2)
    copy = tokenizer.from_json(text.to_json(), bos_id=1, eos_id=2)
    assert copy.encode("a") == text.encode("a") and copy.fingerprint == text.fingerprint


def test_truncation_and_padding_of_a_training_run_are_switched_off(tmp_path):
    backend = byte_fallback_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    write(tmp_path, backend)
    assert len(tokenizer.from_directory(tmp_path).encode("a" * 20, add_special_tokens=False)) == 20
    assert len(tokenizer.from_directory(tmp_path).encode("a", add_special_tokens=False)) == 1


def test_special_tokens_default_to_the_models_and_null_means_none(tmp_path):
    write(tmp_path, byte_fallback_backend(), bos_token=None)
    text = tokenizer.from_directory(tmp_path, bos_id=1, eos_id=2)
    assert (text.bos_id, text.bos_token, text.eos_id) == (None, "", 2)


def test_a_special_token_that_does_not_exist_is_refused(tmp_path):
    write(tmp_path, byte_fallback_backend(), bos_token="<nope>")
    with pytest.raises(ValueError, match="bos_token '<nope>'"):
        tokenizer.from_directory(tmp_path)


def test_broken_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer.from_directory(tmp_path)


def test_decode_takes_arrays_and_refuses_negative_ids():
    text = from_metadata()
    assert text.decode(np.array([3, 4])) == "ab"
    assert text.decode([]) == ""
    with pytest.raises(ValueError, match="-1"):
        text.decode([3, -1])


def test_the_size_of_a_vocabulary_is_one_past_its_largest_id():
    for vocab, size in (({}, 0), ({"a": 0, "b": 1}, 2), ({"a": 0, "b": 7}, 8), ({"a": 1}, 2)):
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
        assert tokenizer.Tokenizer(backend).vocab_size == size
        backend.add_tokens(["c"])
        assert tokenizer.Tokenizer(backend).vocab_size == max([*vocab.values(), backend.token_to_id("c")]) + 1


@pytest.mark.parametrize("entry", [True, 3, [], {}, {"content": 1}])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, entry):
    write(tmp_path, byte_fallback_backend(), bos_token=entry)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token is .*, not the text of a token"):
        tokenizer.from_directory(tmp_path)
