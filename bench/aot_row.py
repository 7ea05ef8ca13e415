"""Compiles one program of an engine for a described device and tells what XLA made of it.

Runs in a process of its own, started by `bench.aot` with `described.environment()`.
"""

import collections
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax

from bench import abstract, bank_reads, bounds, described, hlo
from moecore_jax import families
from moecore_jax.config import RunConfig, from_plain
from moecore_jax.specs import DeviceSpec, ModelSpec

COMPILE_BOUND_S = {"unrolled": 8.0, "scanned": 90.0}
"""Seconds of two cores; unrolled for each layer, scanned in all."""

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "flax")


def measure(config: RunConfig, target: str, name: str, hlo_path: str) -> dict[str, Any]:
  """Compiles a program and reads it.

  Args:
    config: a checked config with `model.published_config`, for nothing is loaded.
    target: one of described.TARGETS.
    name: one of abstract.program_names.
    hlo_path: also write the program's text to this file, unless "".

  Returns:
    The row; the names of its fields carry their units.
  """
  model = families.model_spec(config.model.published_config)
  residency, engine, device = config.freeze(model)
  programs = abstract.Programs(model, residency, engine, described.tracing_device(target))
  program = described.compile_for(target, *programs.jitted(name))
  if hlo_path:
    pathlib.Path(hlo_path).write_text(program.hlo)
  module = hlo.parse(program.hlo)
  reads = bank_reads.bank_reads(module)
  bound = bounds.temp_bound(model, engine, name, residency.prefetch.max_experts)
  compile_bound_s = COMPILE_BOUND_S[engine.layer_loop]
  if engine.layer_loop == "unrolled":
    compile_bound_s *= len(model.layers)
  return {
    "program": name,
    "target": target,
    "model": _describe(model),
    "layer_loop": engine.layer_loop,
    "context_tokens": engine.context_tokens,
    "batch_size": engine.batch_size,
    "slots": sum(residency.slots),
    "lower_s": round(program.lower_s, 2),
    "compile_s": round(program.compile_s, 2),
    "compile_bound_s": compile_bound_s,
    "is_compile_within_bound": program.compile_s <= compile_bound_s,
    "device_argument_bytes": program.argument_bytes,
    "alias_bytes": program.alias_bytes,
    "donated_bytes": sum(_num_bytes(leaf) for leaf in jax.tree.leaves(programs.state)),
    "temp_bytes": program.temp_bytes,
    "temp_bound_bytes": bound.total_bytes,
    "temp_bound": str(bound),
    "is_temp_within_bound": program.temp_bytes <= bound.total_bytes,
    "host_argument_bytes": program.host_argument_bytes,
    "host_temp_bytes": program.host_temp_bytes,
    "host_compute_ops": bank_reads.host_compute_ops(module),
    "prefetch_overlap": bank_reads.prefetch_overlap(module, reads),
    "prefetch_hidden_by": bank_reads.prefetch_hidden_by(module, reads),
    "staging_overlap": bank_reads.staging_overlap(module, reads),
    "bank_reads": _summary(reads),
    "is_bank_read_by_row": all(_is_asked_for(read, model) for read in reads),
    "needed_bytes": program.device_bytes,
    **_fits(program.device_bytes, target, device),
    "versions": versions(),
    "machine": machine(),
  }


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  return leaf.size * leaf.dtype.itemsize


def _describe(model: ModelSpec) -> str:
  experts = " and ".join(
    f"{len(g.layers)} x {g.num_experts} experts, top-{g.num_experts_per_tok}"
    for g in model.expert_groups
  )
  return f"{model.family}, {len(model.layers)} layers, {experts}"


def _is_asked_for(read: bank_reads.BankRead, model: ModelSpec) -> bool:
  """Whether it reads one expert a turn of a counted loop, or a whole layer that is staged."""
  if read.is_several_rows:
    return read.rows in {group.num_experts for group in model.expert_groups}
  return read.is_one_row_in_counted_loop


def _summary(reads: list[bank_reads.BankRead]) -> list[dict[str, Any]]:
  """Equal reads of several layers become one entry with their number."""
  counts = collections.Counter(
    (r.bank, r.opcode, r.shape, r.rows, r.loops, r.is_async, r.is_one_row_in_counted_loop)
    for r in reads
  )
  names = ("bank", "opcode", "shape", "rows", "loops", "is_async", "is_one_row_in_counted_loop")
  return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in counts.items()]


def _fits(needed: int, target: str, device: DeviceSpec) -> dict[str, Any]:
  total = device.memory_bytes or described.MEMORY_BYTES.get(target, 0)
  usable = int(total * device.usable_frac)
  return {"usable_bytes": usable or None, "fits": needed <= usable if usable else None}


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that make a program."""
  found = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue  # optional: the compilers of targets that are not used
  return found


def machine() -> str:
  """Returns the processor and the cores of this machine."""
  model = platform.processor() or platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":", 1)[1].strip() if names else model
  return f"{model}, {os.cpu_count()} cores"


def main() -> None:
  """Reads a list of [config, target, name, hlo_path] from stdin, writes the rows to a file, both
  JSON."""
  tasks = json.load(sys.stdin)
  rows = [measure(from_plain(RunConfig, config), *rest) for config, *rest in tasks]
  pathlib.Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
  main()
