"""Peak memory of loading, in a process of its own: below 1.3 times the model, whatever it is read from."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import LanguageModel
from specjax.models import fetch, hf_config, llama, llama_params, orbax
from tests.models import tiny

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peaks are read from /proc"),
]
SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 65536, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
PROGRAM = """
import json, resource, sys
import jax
from specjax.models.load import load

def memory(field):  # bytes
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

small, big, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
jax.block_until_ready(load(small, **options).params)
before = memory("VmRSS")
params = jax.block_until_ready(load(big, **options).params)
print(json.dumps([memory("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


def written(path, kind, **settings):
    """A checkpoint of zeros and ones: no time is spent on random numbers."""
    settings = tiny.CONFIG | settings
    config = hf_config.parse_config(settings)
    weights = {name: np.zeros(shape, np.float32) for name, shape in llama_params.tensor_shapes(config).items()}
    for x in weights.values():
        x[..., 0] = 1
    if kind == "safetensors":
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings))
        save_file(weights, path / "model.safetensors")
    else:
        params = llama_params.params_from_tensors(config, lambda name, shape: weights[name])
        orbax.save(path, LanguageModel(llama.model(config), params, config=config))
    return path


def peak(small, big, options, mapped=0):
    """How much memory loading ``big`` took over what it left, the pages of its mapped file aside."""
    words = [sys.executable, "-c", PROGRAM, str(small), str(big), json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    most, size = json.loads(done.stdout)
    return (most - mapped) / size, size


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"dtype": "bfloat16"}])
def test_up_to_a_gigabyte_of_safetensors(tmp_path, options):
    path = written(tmp_path / "big", "safetensors", **SIZES, num_hidden_layers=12 if not options else 4)
    mapped = (path / "model.safetensors").stat().st_size  # the kernel takes these pages back when it needs them
    ratio, size = peak(written(tmp_path / "small", "safetensors"), path, options, mapped)
    assert ratio < 1.3 and (options or size > 9e8)


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}])
def test_a_checkpoint_of_our_own(tmp_path, options):
    path = written(tmp_path / "big", "orbax", **SIZES, num_hidden_layers=6)
    ratio, _ = peak(written(tmp_path / "small", "orbax"), path, options)
    assert ratio < 1.3


def test_a_gguf_file_whose_embedding_is_two_thirds_of_it():
    file = fetch.fetch("gemma3-270m")
    ratio, _ = peak(fetch.fetch("smollm2-135m-instruct"), file, {}, file.stat().st_size)
    assert ratio < 1.3
