"""What the TPU's own compiler makes of decoding and of writing text to train on, for one chip and for eight. No TPU is
needed, only `make libtpu`.

In a process of its own: nothing else in the tests sees that compiler.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full
PROGRAM = """
import dataclasses, json, re, sys
import tpu_programs as tpu
from specjax.models.config import LlamaConfig

topology, what, quantization = sys.argv[1:]
config = LlamaConfig(512, 256, 512, 2, 16, 8, head_dim=128, quantization=quantization)
made = tpu.Programs(tpu.mesh_of(topology, 1), config, k=3, batch=8)
compiled = getattr(made, what)()
text, cost = compiled.as_text(), tpu.cost_of(compiled)
types = dict(re.findall(r"(%[\\w.-]+) = (\\w+)\\[", text))
products = re.findall(r"convolution\\((%[\\w.-]+), (%[\\w.-]+)\\)[^\\n]*dot_general", text)
names, copies, inside = {}, [], ""
for line in text.splitlines():
    head = re.match(r"(ENTRY )?%[\\w.-]+ \\(.*\\{$", line)
    inside = ("entry" if head[1] else "loop") if head else inside
    if re.search(r"= u16\\[8,\\d+,512,128\\]\\S* copy\\(", line):
        copies.append(inside)
print(json.dumps({
    "calls": [word for word in ("callback", "infeed", "outfeed") if word in text], "aliased": cost.aliased,
    "copies": copies, "collectives": cost.collectives, "weights": sorted({types.get(b, "") for _, b in products}),
    "operands": sorted({types.get(a, "") for a, _ in products}),
    "gathers": [list(map(int, shape.split(","))) for shape in re.findall(r"\\w+\\[([\\d,]+)\\]\\S* all-gather", text)],
}))
"""


def found(topology, what="decode", quantization=""):
    words = [sys.executable, "-c", PROGRAM, topology, what, quantization]
    paths = f"{ROOT / 'scripts'}:{ROOT}"
    # A fresh environment: neither the flags of these tests nor a TPU's own.
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": paths}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("topology", "chips", "what"), [("v5e:1x1", 1, "decode"), ("v5e:2x4", 8, "decode"), ("v5e:2x4", 8, "write_text")]
)
def test_decoding_and_writing_text_stay_on_the_chips_and_update_their_cache_in_place(topology, chips, what):
    said = found(topology, what)
    assert said["calls"] == []
    cache = 2 * 2 * 8 * (8 // chips) * 512 * 128 * 2  # k and v, layers, rows, heads, slots, channels, bytes
    assert said["aliased"] >= cache
    assert said["copies"] == []  # a layer of the cache has one layout, before the rounds and in them
    assert bool(said["collectives"]) == (chips > 1)
    # No layer of the cache crosses from chip to chip, and no logits of a window or a row are gathered.
    assert sum(said["collectives"].values()) < cache // 4
    assert not [shape for shape in said["gathers"] if shape[-1] >= 512]


def test_products_take_bfloat16_and_int8_as_they_are():
    """Neither is turned to another type in memory first."""
    said = found("v5e:1x1")
    assert "f32" not in said["weights"] + said["operands"] and "bf16" in said["weights"]
    said = found("v5e:1x1", quantization="int8")
    assert "s8" in said["weights"] and "f32" not in said["weights"] + said["operands"]
