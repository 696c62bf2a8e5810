"""GGUF: types, layout, names, configuration, and files that are broken."""

import logging
import struct

import gguf as package
import numpy as np
import pytest

from specjax.models import gguf_config
from specjax.models.config import RopeScaling
from specjax.models.gguf import GGUFFile
from tests.models import tiny

RNG = np.random.default_rng(5)
ARCH = {"general.architecture": "llama"}


def one(tmp_path, kind, shape, raw, name="token_embd.weight"):
    return GGUFFile(tiny.write_gguf(tmp_path / "one.gguf", {name: (kind, shape, raw)}, ARCH))


# --- types: each encoded here with its error bound, or decoded here value by value as ggml-quants.c does ------------


def encode_f32(x):
    return x.astype("<f4").tobytes(), np.zeros_like(x)


def encode_f16(x):
    return x.astype("<f2").tobytes(), np.abs(x) * 2.0**-11 + 1e-7


def encode_bf16(x):
    return (x.view(np.uint32) >> 16).astype("<u2").tobytes(), np.abs(x) * 2.0**-7  # cut, not rounded


def encode_q8_0(x):
    blocks = x.reshape(-1, 32)
    d = (np.abs(blocks).max(1) / 127).astype("<f2")
    q = np.clip(np.round(blocks / d.astype(np.float32)[:, None]), -127, 127).astype(np.int8)
    raw = b"".join(scale.tobytes() + row.tobytes() for scale, row in zip(d, q))
    return raw, np.repeat(d.astype(np.float32), 32).reshape(x.shape) * 0.6


def nibbles(q):
    """[blocks, 32] values below 16: the first half in the low bits, the second in the high ones."""
    return (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)


def encode_q4_0(x):
    blocks = x.reshape(-1, 32)
    d = (np.abs(blocks).max(1) / 7).astype("<f2")
    q = np.clip(np.round(blocks / d.astype(np.float32)[:, None]) + 8, 0, 15).astype(np.uint8)
    raw = b"".join(scale.tobytes() + row.tobytes() for scale, row in zip(d, nibbles(q)))
    return raw, np.repeat(d.astype(np.float32), 32).reshape(x.shape) * 0.6


def encode_q4_1(x):
    blocks = x.reshape(-1, 32)
    m = blocks.min(1).astype("<f2")
    d = ((blocks.max(1) - blocks.min(1)) / 15).astype("<f2")
    q = np.round((blocks - m.astype(np.float32)[:, None]) / d.astype(np.float32)[:, None])
    q = np.clip(q, 0, 15).astype(np.uint8)
    raw = b"".join(a.tobytes() + b.tobytes() + row.tobytes() for a, b, row in zip(d, m, nibbles(q)))
    return raw, np.repeat(d.astype(np.float32), 32).reshape(x.shape) * 0.6


def encode_q6_k(x):
    """Super-blocks of 256: 16 groups of 16 with an int8 scale each, 6-bit values around 32."""
    raw, bounds = b"", []
    for block in x.reshape(-1, 256):
        peak = np.abs(block.reshape(16, 16)).max(1) / 31
        d = np.float16(peak.max() / 127)
        scales = np.clip(np.ceil(peak / np.float32(d)), 1, 127).astype(np.int8)
        step = np.repeat(np.float32(d) * scales, 16)
        q = np.clip(np.round(block / step) + 32, 0, 63).astype(np.uint8)
        ql, qh = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
        for i in range(256):
            half, quarter, lane = i // 128, i % 128 // 32, i % 32
            ql[half * 64 + lane + 32 * (quarter % 2)] |= (q[i] & 15) << (4 * (quarter // 2))
            qh[half * 32 + lane] |= (q[i] >> 4) << (2 * quarter)
        raw += ql.tobytes() + qh.tobytes() + scales.tobytes() + d.tobytes()
        bounds.append(step * 0.6)
    return raw, np.concatenate(bounds).reshape(x.shape)


ENCODERS = {"F32": encode_f32, "F16": encode_f16, "BF16": encode_bf16, "Q8_0": encode_q8_0, "Q4_0": encode_q4_0,
            "Q4_1": encode_q4_1, "Q6_K": encode_q6_k}


@pytest.mark.parametrize("kind", ENCODERS)
def test_each_type_dequantises_within_the_bound_of_its_block(tmp_path, kind):
    x = RNG.normal(size=(3, 512)).astype(np.float32)
    raw, bound = ENCODERS[kind](x)
    file = one(tmp_path, kind, x.shape, raw)
    got = file.read("model.embed_tokens.weight")
    assert got.shape == x.shape and got.dtype == np.float32
    assert (np.abs(got - x) <= bound).all()
    assert file.tensors["token_embd.weight"].type == kind


def decode_q4_k(raw):
    """dequantize_row_q4_K of ggml-quants.c, one value at a time."""
    values = []
    for start in range(0, len(raw), 144):
        block = raw[start : start + 144]
        d, dmin = struct.unpack("<ee", block[:4])
        packed, quants = block[4:16], block[16:]
        for j in range(8):
            if j < 4:
                scale, least = packed[j] & 63, packed[j + 4] & 63
            else:
                scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
                least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
            for lane in range(32):
                byte = quants[j // 2 * 32 + lane]
                values.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * least)
    return np.array(values)


def test_q4_k_dequantises_as_ggml_does(tmp_path):
    raw = b"".join(np.float16([0.01, 0.02]).tobytes() + RNG.bytes(140) for _ in range(4))
    got = one(tmp_path, "Q4_K", (2, 512), raw).read("model.embed_tokens.weight")
    np.testing.assert_allclose(got.ravel(), decode_q4_k(raw), rtol=1e-5, atol=1e-6)


def test_the_type_of_each_tensor_is_read_from_its_own_header(tmp_path):
    x = RNG.normal(size=(4, 256)).astype(np.float32)
    entries = {f"tensor_{kind}": (kind, x.shape, encode(x)[0]) for kind, encode in ENCODERS.items()}
    file = GGUFFile(tiny.write_gguf(tmp_path / "many.gguf", entries, ARCH))
    for kind, encode in ENCODERS.items():
        assert (np.abs(file.read(f"tensor_{kind}") - x) <= encode(x)[1]).all()


def test_dimensions_are_stored_in_reverse(tmp_path):
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    file = one(tmp_path, "F32", (3, 5), x.tobytes())
    assert file.shapes == {"model.embed_tokens.weight": (3, 5)}
    np.testing.assert_array_equal(file.read("model.embed_tokens.weight"), x)


def test_a_file_of_the_gguf_packages_own_writer_reads_the_same(tmp_path):
    writer = package.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_uint64("x.u64", 2**40)
    writer.add_array("x.strings", ["a", "é", ""])
    writer.add_array("x.floats", [0.5, -1.5])
    writer.add_bool("x.flag", True)
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor("plain", x)
    quantised = package.quantize(x, package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", quantised, raw_dtype=package.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = GGUFFile(tmp_path / "w.gguf")
    assert file.metadata["x.u64"] == 2**40 and file.metadata["x.strings"] == ["a", "é", ""]
    assert file.metadata["x.floats"] == [0.5, -1.5] and file.metadata["x.flag"] is True
    np.testing.assert_array_equal(file.read("plain"), x)
    reference = package.dequantize(quantised, package.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(file.read("quantised"), reference)


# --- layout per architecture ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_q_and_k_rows_are_unpermuted_for_llama_and_for_no_other_architecture(tmp_path, architecture):
    weights = tiny.tensors()
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in tiny.METADATA.items()}
    metadata["general.architecture"] = architecture
    entries = tiny.gguf_tensors(weights, permute=architecture == "llama")
    file = GGUFFile(tiny.write_gguf(tmp_path / "m.gguf", entries, metadata))
    assert file.shapes.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(file.read(name), array, err_msg=name)


def test_biases_of_q_and_k_are_unpermuted_too(tmp_path):
    bias = np.arange(32, dtype=np.float32)
    entries = {"blk.0.attn_q.bias": ("F32", (32,), tiny.permuted(bias, tiny.HEADS).tobytes())}
    file = GGUFFile(tiny.write_gguf(tmp_path / "m.gguf", entries))
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.bias"), bias)


# --- broken files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "columns", "block"), [("Q6_K", 320, 256), ("Q4_K", 128, 256), ("Q8_0", 40, 32)])
def test_a_row_that_is_no_multiple_of_the_block_is_named_with_type_and_shape(tmp_path, kind, columns, block):
    with pytest.raises(ValueError, match=rf"'token_embd.weight' of type {kind} has shape \(4, {columns}\).* {block}"):
        one(tmp_path, kind, (4, columns), b"\0" * 4096)


def test_an_unsupported_type_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"'token_embd\.weight' has type Q2_K"):
        one(tmp_path, "Q2_K", (1, 256), b"\0" * 84)


def test_a_truncated_file_names_itself_and_the_first_tensor_that_is_cut(tmp_path):
    path = tiny.write_gguf(tmp_path / "cut.gguf")
    whole = path.read_bytes()
    last = list(tiny.gguf_tensors(tiny.tensors()))[-1]
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"cut\.gguf is truncated: tensor '{last}'"):
        GGUFFile(path)


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path):
    path = tiny.write_gguf(tmp_path / "cut.gguf")
    whole = path.read_bytes()
    for length in [0, 3, 4, 10, 24, *range(25, len(whole) - 1, 499)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_other_files_and_versions_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4" + b"\0" * 100)
    with pytest.raises(ValueError, match=r"x\.gguf is not a GGUF file"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + b"\0" * 100)
    with pytest.raises(ValueError, match="version"):
        GGUFFile(path)


# --- configuration --------------------------------------------------------------------------------------------------


def config(tmp_path, entries=None, **changes):
    return gguf_config.config_of(GGUFFile(tiny.write_gguf(tmp_path / "c.gguf", entries, **changes)))


def test_configuration_comes_from_the_metadata(tmp_path):
    got = config(tmp_path)
    assert (got.vocab_size, got.hidden_size, got.intermediate_size, got.num_layers) == (40, 20, 28, 2)
    assert (got.num_heads, got.num_kv_heads, got.head_dim) == (4, 2, 8)
    assert (got.rms_eps, got.rope_theta, got.max_position_embeddings) == (1e-5, 10000.0, 64)
    assert (got.tie_embeddings, got.attention_bias, got.mlp_bias) == (False, False, False)
    assert (got.bos_id, got.eos_ids) == (1, (2,))
    assert got.rope_scaling.kind == "default"


def test_a_file_without_output_tensor_is_tied(tmp_path):
    assert config(tmp_path, tiny.gguf_tensors(tiny.tensors(tied=True))).tie_embeddings


def test_end_of_turn_is_an_end_too(tmp_path):
    assert config(tmp_path, **{"tokenizer.ggml.eot_token_id": 0}).eos_ids == (2, 0)
    assert config(tmp_path, **{"tokenizer.ggml.eot_token_id": 2}).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "kind", "factor"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "default", 1.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"llama.rope.scale_linear": 2.0}, "linear", 2.0),
    ],
)
def test_linear_rope_scaling_is_read(tmp_path, changes, kind, factor):
    scaling = config(tmp_path, **changes).rope_scaling
    assert (scaling.kind, scaling.factor) == (kind, factor)


def llama3_divisors(factor, dim, theta):
    """Per-frequency divisors as Llama 3.1's paper code computes them, one at a time."""
    result = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_are_recognised(tmp_path, factor):
    divisors = llama3_divisors(factor, tiny.HEAD_DIM, 500000.0)
    entries = tiny.gguf_tensors(tiny.tensors()) | {"rope_freqs.weight": ("F32", divisors.shape, divisors.tobytes())}
    scaling = config(tmp_path, entries, **{"llama.rope.freq_base": 500000.0}).rope_scaling
    assert scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in GGUFFile(tmp_path / "c.gguf").shapes


def test_other_frequency_factors_are_refused(tmp_path):
    divisors = np.linspace(1, 5, tiny.HEAD_DIM // 2, dtype=np.float32)
    entries = tiny.gguf_tensors(tiny.tensors()) | {"rope_freqs.weight": ("F32", divisors.shape, divisors.tobytes())}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        config(tmp_path, entries)


@pytest.mark.parametrize("architecture", ["qwen2moe", "gemma", "gemma3n", "phi3", ""])
def test_other_architectures_are_refused_by_name(tmp_path, architecture):
    with pytest.raises(ValueError, match=f"architecture '{architecture}'"):
        config(tmp_path, **{"general.architecture": architecture})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "longrope"), ("llama.expert_count", 8), ("llama.attention.sliding_window", 16),
        ("llama.rope.dimension_count", 4), ("llama.attention.value_length", 4), ("llama.logit_scale", 0.5),
        ("llama.attention.head_count_kv", [2, 1]), ("llama.something_new", 1), ("split.count", 2),
        ("general.type", "adapter"), ("llama.rope.scaling.attn_factor", 0.5),
    ],
)
def test_metadata_that_changes_the_mathematics_is_refused_by_key(tmp_path, key, value):
    with pytest.raises(ValueError, match=key if not key.endswith("scaling.type") else "'longrope'"):
        config(tmp_path, **{key: value})


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length",
                                 "feed_forward_length", "attention.layer_norm_rms_epsilon"])
def test_missing_metadata_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=rf"llama\.{key} is missing"):
        config(tmp_path, **{f"llama.{key}": None})


def test_reading_is_quiet(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        GGUFFile(tiny.write_gguf(tmp_path / "q.gguf")).read("model.norm.weight")
    assert not caplog.records
