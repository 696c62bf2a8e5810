"""Text to token ids and back, from a ``tokenizer.json`` or from the metadata of a GGUF file.

Both end in one `tokenizers.Tokenizer`, so encoding is the library's and only the construction is ours.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from specjax.models import sentencepiece
from specjax.models.huggingface import read_json, read_text
from specjax.static import show

# GGUF token types (gguf.TokenType): these two are cut out of the text before anything else looks at it.
_CONTROL, _USER_DEFINED = 3, 4

# Pre-tokenizers by their GGUF name: the pieces a text is cut into before merging. GPT-2's own regex is part of the
# byte-level step. SmolLM's cuts decimal digits apart; by the reference ids it leaves other numerics (one half) alone.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": (None, True),  # (pattern to split at first, whether GPT-2's regex follows)
    "smollm": (r"\p{Nd}", True),
    "llama-bpe": (_LLAMA3_PATTERN, False),
    "smaug-bpe": (_LLAMA3_PATTERN, False),  # SmolLM3
    "dbrx": (_LLAMA3_PATTERN, False),  # OLMo 2
    "qwen2": (_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), False),
}
_COMPOSED = {"qwen2"}  # characters and their accents become one before anything else (Unicode's form C)


class Tokenizer:
    """Encodes and decodes; knows the strings of its tokens.

    Args:
      backend: a `tokenizers.Tokenizer`; its truncation and padding, if any, are switched off.
      bos_id, eos_id: ids of the begin and end tokens, None where there are none. Whether `encode` adds them is
        decided by the backend's post-processor.
    """

    def __init__(self, backend: Any, *, bos_id: int | None = None, eos_id: int | None = None):
        backend.no_truncation()  # a file may carry the limits of some training run: a prompt must never be cut silently
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, bos_id={self.bos_id}, eos_id={self.eos_id})"

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """The string of every id, in the vocabulary's own spelling; "" where an id is unused."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        strings = [""] * (max(vocab.values(), default=-1) + 1)
        for string, token in vocab.items():
            strings[token] = string
        return tuple(strings)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One past the largest id (a model's embedding table may be longer)."""
        count = self.backend.get_vocab_size(with_added_tokens=True)
        if all(self.backend.id_to_token(token) is not None for token in range(count)):
            return count  # without `tokens`, which for 262,144 of them are 80 MB more beside a model's weights
        return len(self.tokens)

    @property
    def bos_token(self) -> str:
        """The begin token as text, "" if there is none."""
        return "" if self.bos_id is None else self.tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        """The end token as text, "" if there is none."""
        return "" if self.eos_id is None else self.tokens[self.eos_id]

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens such as ``<|im_end|>``."""
        return frozenset(token for token, entry in self._added.items() if entry.special)

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        return self.backend.get_added_tokens_decoder()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when every id stands for the same string in both."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()

    def difference(self, other: "Tokenizer") -> str | None:
        """The first id at which two vocabularies differ, as a sentence; None if they are the same."""
        if self.fingerprint == other.fingerprint:
            return None
        for token, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != theirs:
                return f"token {token} is {mine!r} in one and {theirs!r} in the other"
        return f"one has {self.vocab_size} tokens, the other {other.vocab_size}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Control tokens spelled out in the text become their ids.

        ``add_special_tokens`` adds what the tokenizer adds by default, e.g. a begin token; switch it off for a
        text that came out of a chat template, which has them already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids (list or array). Bytes that are not UTF-8 become U+FFFD; unused ids become nothing.

        Raises:
          ValueError: naming a negative id.
        """
        ids = [int(token) for token in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"cannot decode the negative token id {min(ids)}")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text: what a streamer needs to never show half a character.

        Exact for byte-level vocabularies; a SentencePiece decoder may in addition strip the first space of a text.
        """
        return self._bytes(token)

    @functools.cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id: what two vocabularies are compared by; b"" where an id is unused."""
        return tuple(map(self._bytes, range(self.vocab_size)))

    def _bytes(self, token: int) -> bytes:
        string = self.tokens[token]
        if token in self._added:
            return string.encode()
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in string):
                return bytes(table[character] for character in string)
            return string.encode()  # as the decoder does
        if len(string) == 6 and string.startswith("<0x") and string.endswith(">"):
            return bytes([int(string[3:5], 16)])
        return string.replace("\u2581", " ").encode()

    @functools.cached_property
    def _byte_level(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def to_json(self) -> str:
        """The backend in the ``tokenizer.json`` format."""
        return self.backend.to_str()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def from_json(text: str, *, bos_id: int | None = None, eos_id: int | None = None, source: str = "tokenizer.json"):
    """A Tokenizer from the text of a ``tokenizer.json``; ``source`` names it in errors."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{source} is not a tokenizer the `tokenizers` library can read: {error}") from error
    return Tokenizer(backend, bos_id=bos_id, eos_id=eos_id)


def from_directory(path: pathlib.Path, *, bos_id: int | None = None, eos_id: int | None = None) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, None if it has no ``tokenizer.json``.

    ``bos_token`` and ``eos_token`` of ``tokenizer_config.json`` win over the ids given (those of the model's config).
    """
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = from_json(read_text(file), bos_id=bos_id, eos_id=eos_id, source=str(file))
    settings_file = path / "tokenizer_config.json"
    if settings_file.exists():
        settings = read_json(settings_file)
        tokenizer.bos_id = _special_id(tokenizer, settings, "bos_token", bos_id, settings_file)
        tokenizer.eos_id = _special_id(tokenizer, settings, "eos_token", eos_id, settings_file)
    # A model may name ids past the tokenizer's end (tiny test models do); as text such a token does not exist.
    for name in ("bos_id", "eos_id"):
        token = getattr(tokenizer, name)
        if token is not None and not 0 <= token < tokenizer.vocab_size:
            setattr(tokenizer, name, None)
    return tokenizer


def _special_id(tokenizer: Tokenizer, settings: Mapping[str, Any], name: str, default: int | None, file) -> int | None:
    if name not in settings:
        return default
    entry = settings[name]
    string = entry.get("content", entry) if isinstance(entry, dict) else entry
    if string is None:
        return None
    if not isinstance(string, str):
        raise ValueError(f"{file}: {name} is {show(entry)}, not the text of a token")
    token = tokenizer.backend.token_to_id(string)
    if token is None:
        raise ValueError(f"{file} names {name} {string!r}, which tokenizer.json does not have")
    return token


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by the ``tokenizer.ggml.*`` entries of a GGUF file.

    Raises:
      ValueError: naming an unknown tokenizer model or pre-tokenizer, a missing entry or a repeated token.
    """
    from tokenizers import AddedToken, processors

    def entry(name, *default):
        key = f"tokenizer.ggml.{name}"
        if key not in metadata and not default:
            raise ValueError(f"{source}: the tokenizer entry {key} is missing")
        return metadata.get(key, *default)

    kind = entry("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{source}: tokenizer model {kind!r} is not supported; supported: 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece)"
        )
    tokens = entry("tokens")
    vocab = {string: token for token, string in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(string for token, string in enumerate(tokens) if vocab[string] != token)
        raise ValueError(f"{source}: token {repeated!r} occurs twice in tokenizer.ggml.tokens")
    types = entry("token_type", [1] * len(tokens))
    scores = entry("scores") if kind == "llama" else types
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            raise ValueError(f"{source}: {len(tokens)} tokens, but {len(values)} entries in tokenizer.ggml.{name}")
    if kind == "llama":
        backend = sentencepiece.backend(tokens, scores, types, space_prefix=entry("add_space_prefix", True))
    else:
        backend = _byte_level(vocab, entry("merges"), entry("pre", None), source)
    typed = list(zip(tokens, types))
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, t in typed if t == _CONTROL])
    backend.add_tokens([AddedToken(s, normalized=False) for s, t in typed if t == _USER_DEFINED])

    bos_id, eos_id = entry("bos_token_id", None), entry("eos_token_id", None)
    for name, token in (("bos", bos_id), ("eos", eos_id)):
        if token is not None and not 0 <= token < len(tokens):
            raise ValueError(f"{source}: {name}_token_id is {token}, but there are {len(tokens)} tokens")
    # llama.cpp's defaults: SentencePiece and Llama 3's tokenizer begin every text with BOS, the others do not.
    begins = entry("add_bos_token", kind == "llama" or entry("pre", None) == "llama-bpe")
    before = [(tokens[bos_id], bos_id)] if bos_id is not None and begins else []
    after = [(tokens[eos_id], eos_id)] if eos_id is not None and entry("add_eos_token", False) else []
    if before or after:
        template = [*(string for string, _ in before), "$A", *(string for string, _ in after)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B"], special_tokens=list(dict.fromkeys(before + after))
        )
    return Tokenizer(backend, bos_id=bos_id, eos_id=eos_id)


def _byte_level(vocab: Mapping[str, int], merges: Iterable[str], pre: str | None, source: str) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"{source}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {supported}")
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    try:
        model = models.BPE(vocab=dict(vocab), merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise ValueError(f"{source}: the merges do not fit the tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    pattern, gpt2_regex = _PRE_TOKENIZERS[pre]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_regex)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, bytewise])
    backend.decoder = decoders.ByteLevel()
    return backend
