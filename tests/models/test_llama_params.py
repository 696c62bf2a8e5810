"""The tree of weights, and what a configuration refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import LlamaConfig, RopeScaling, llama, llama_params
from specjax.models.config import Rope
from tests.models.llama_oracle import BASE, CONFIGS, made, random_weights

# --- the tree of weights


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_abstract_params_describe_the_params(config):
    for scan_layers in (False, True):
        _, params, _ = made(config, dtype=jnp.bfloat16, scan_layers=scan_layers)
        abstract = llama_params.abstract_params(config, dtype=jnp.bfloat16, scan_layers=scan_layers)
        assert jax.tree.structure(params) == jax.tree.structure(abstract)
        jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(f"{a} {b}"), params, abstract)


def test_stacking_and_unstacking_are_inverse():
    _, params, _ = made(BASE)
    _, stacked, _ = made(BASE, scan_layers=True)
    assert jax.tree.map(np.array_equal, llama_params.stack_layers(params), stacked)
    back = llama_params.unstack_layers(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))


def test_a_tensor_of_another_shape_is_refused_by_name():
    weights = random_weights(BASE)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].T
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*\(24, 40\).*\(40, 24\)"):
        llama_params.params_from_tensors(BASE, lambda name, shape: weights[name])


def test_every_tensor_is_asked_for_once():
    weights, asked = random_weights(BASE), []
    llama_params.params_from_tensors(BASE, lambda name, shape: (asked.append(name), weights[name])[1])
    assert sorted(asked) == sorted(llama_params.tensor_shapes(BASE))


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_other_weight_types_are_refused(dtype):
    with pytest.raises(ValueError, match=f"float32 or bfloat16, not {dtype}"):
        llama.model(BASE, dtype=dtype)


# --- configuration


def test_head_dim_is_derived_only_when_it_is_not_given():
    assert BASE.head_dim == 6
    assert dataclasses.replace(BASE, hidden_size=20, head_dim=8).q_size == 32
    with pytest.raises(ValueError, match=r"hidden_size \(21\).*num_heads \(4\)"):
        LlamaConfig(67, 21, 40, 2, 4, 2)


@pytest.mark.parametrize("kind", ["ntk", "dynamic", "longrope", "mrope"])
def test_an_unknown_rope_type_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"'{kind}'.*default, linear, llama3"):
        RopeScaling(kind)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"num_layers": 10**9}, "num_layers must be 10000 at most, got 1000000000"),
        ({"num_layers": True}, "num_layers must be a whole number, got True"),
        ({"norm_offset": "x"}, "norm_offset must be a number, got 'x'"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"bos_id": []}, r"bos_id must be a whole number or None, got \[\]"),
        ({"eos_ids": (None,)}, r"eos_ids must be whole numbers, got \(None,\)"),
        ({"head_dim": -2}, "head_dim must be positive, got -2"),
        ({"windows": (4,)}, "windows has 1 entries for num_layers=2"),
        ({"windows": (4, -1)}, r"windows must be 0 \(none\) or positive, got \(4, -1\)"),
        ({"ropes": (None,) * 3}, "ropes has 3 entries for num_layers=2"),
        ({"norms": "between"}, "norms 'between' is not supported; supported: before, after, both"),
        ({"activation": "relu"}, "activation 'relu' is not supported; supported: silu, gelu_tanh"),
        ({"qk_norm": True, "wide_qk_norm": True}, "qk_norm and wide_qk_norm are both set"),
        ({"logit_softcap": -1.0}, r"logit_softcap must be positive, or 0 for none, got -1\.0"),
        ({"embedding_scale": 0.0}, r"embedding_scale must be positive, got 0\.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_an_odd_head_dim_is_refused_with_the_model():
    with pytest.raises(ValueError, match="head_dim must be even, got 5"):
        llama.model(dataclasses.replace(BASE, hidden_size=20, head_dim=0))


def test_configurations_are_values():
    assert hash(BASE) == hash(dataclasses.replace(BASE))
    assert dataclasses.replace(BASE, eos_ids=[2, 3]).eos_ids == (2, 3)
    assert dataclasses.replace(BASE, windows=[0, 0], ropes=[Rope(), Rope()]) == BASE
