"""Several devices and several hosts, for the scripts: --mesh and --multihost."""

import argparse
import math
import os
import sys

import jax

JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # of processes started by hand


def add_arguments(group) -> None:
    group.add_argument("--mesh", help="devices as DATA,MODEL: parts of a batch, of the matrices; default one device")
    group.add_argument(
        "--multihost", action="store_true", help="one of several processes, as TPU VMs, Slurm and Open MPI start them; "
        f"found out alone where {', '.join(JOB)} are set",
    )  # fmt: skip


def refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Options that do not work, with what to say."""
    job = [name for name in JOB if name in os.environ]
    odd = [name for name in JOB[1:] if not os.environ.get(name, "0").isdecimal()]
    remedy = "for one of several processes, or none to run alone"
    return [
        (bool(args.mesh) and not _pair(args.mesh), f"--mesh {args.mesh}: give two numbers, 1 or more, as in 8,1"),
        (0 < len(job) < len(JOB), f"the environment has {', '.join(job)} of {', '.join(JOB)}: set all {remedy}"),
        *((True, f"the environment has {name}={os.environ[name]}: set a whole number {remedy}") for name in odd),
    ]


def _pair(text: str) -> bool:
    parts = text.split(",")
    return len(parts) == 2 and all(part.isdecimal() and int(part) > 0 for part in parts)


def start(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are some, before anything is computed; all but the first fall silent."""
    by_hand = all(name in os.environ for name in JOB)
    if not (args.multihost or by_hand):
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, count, number = (os.environ.get(name) for name in JOB)
    try:
        if address is not None and count is not None and number is not None:
            jax.distributed.initialize(address, int(count), int(number))
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        how = f"{', '.join(JOB)} of the environment" if by_hand else "--multihost"
        raise ValueError(
            f"{how}: the processes of this job were not found ({error}); leave it out to run alone"
        ) from error
    if jax.process_index():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for the rest of the program
        sys.excepthook = _excepthook


def _excepthook(kind, value, trace) -> None:
    sys.stderr = sys.__stderr__
    sys.__excepthook__(kind, value, trace)


def mesh(args: argparse.Namespace):
    """The mesh that was asked for, or None.

    Raises:
      ValueError: more devices than there are; several processes without a mesh of all their devices.
    """
    from specjax import sharding

    count = jax.device_count()
    sizes = tuple(map(int, args.mesh.split(","))) if args.mesh else (1, 1)
    if math.prod(sizes) > count:
        raise ValueError(
            f"--mesh {args.mesh}: needs {math.prod(sizes)} devices, there are {count}; lower DATA or MODEL, or leave "
            "it out"
        )
    made = sharding.make_mesh(*sizes) if args.mesh else None
    if jax.process_count() > 1 and (made is None or made.size != count):
        given = f"--mesh {args.mesh}" if args.mesh else "--mesh is missing"
        raise ValueError(
            f"{given}: {jax.process_count()} processes have {count} devices, give all of them, as in --mesh {count},1"
        )
    return made
