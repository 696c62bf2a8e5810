"""SentencePiece vocabularies of GGUF files (``tokenizer.ggml.model`` "llama") as `tokenizers.Tokenizer`.

Such a vocabulary has scores instead of merges: of all neighbours that together are a token, those whose token has the
best score are joined first (Kudo and Richardson, SentencePiece, arXiv 1808.06226, 2018). That is byte-pair encoding
with every way to cut a token in two tokens as a merge, ranked by the score of the whole. Spaces are U+2581, and what no
token covers is spelt in bytes.
"""

from collections.abc import Sequence
from typing import Any

SPACE = "\u2581"
_NORMAL, _UNKNOWN = 1, 2  # gguf.TokenType


def backend(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, space_prefix: bool) -> Any:
    """The tokenizer, without its control and user-defined tokens and its begin and end.

    Args:
      tokens: the vocabulary in the order of its ids, all different.
      scores, types: of each token.
      space_prefix: a text begins with a space that is not there, which decoding takes away again.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    unknown = next((string for string, kind in zip(tokens, types) if kind == _UNKNOWN), None)
    if unknown is None and "<unk>" in tokens:  # many files call it a control token
        unknown = "<unk>"
    model = models.BPE(
        {string: token for token, string in enumerate(tokens)}, merges(tokens, scores, types), unk_token=unknown,
        fuse_unk=True, byte_fallback=True,
    )
    result = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    result.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if space_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    result.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return result


def merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of normal tokens that is a normal token, best score of the whole first.

    >>> merges(["a", "b", "ab", "bab"], [0.0, -1.0, -3.0, -2.0], [1, 1, 1, 1])
    [('b', 'ab'), ('a', 'b')]
    """
    known = {string: token for token, string in enumerate(tokens) if types[token] == _NORMAL}
    result = []
    for whole in sorted(known, key=lambda string: -scores[known[string]]):
        pairs = [(whole[:cut], whole[cut:]) for cut in range(1, len(whole))]
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        result += sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]])) if len(pairs) > 1 else pairs
    return result
