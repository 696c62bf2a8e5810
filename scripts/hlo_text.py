"""What collectives a compiled program holds, read from the compiler's text."""

import math
import re

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "s64": 8}


def collectives(text: str) -> dict[str, float]:
    """Bytes that the collectives of a program bring to a device, by kind; the body of a loop once. A permute counts for
    the share of the devices that receive something."""
    devices = int((re.findall(r"num_partitions=(\d+)", text) or ["1"])[0])
    found: dict[str, float] = {}
    for result, kind, start, rest in re.findall(rf"= (.*?) ({KINDS})(-start)?\((.*)", text):
        sizes = [size(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", result)]
        if kind == "collective-permute":  # with -start: operand, result and two semaphores
            pairs = re.findall(r"\{\d+,\d+\}", rest.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
            sizes = [sizes[0] * len(pairs) / devices]
        elif start and kind != "all-reduce":  # operands before results
            sizes = sizes[len(sizes) // 2 :]
        found[kind] = found.get(kind, 0) + sum(sizes)
    return found


def size(dtype: str, shape: str) -> float:
    """Bytes of an array."""
    return WIDTHS.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
