"""Compiles the programs of a config for a device that is described, not attached, and tells what
XLA made of them.

    python -m bench.aot --config=configs/deepseek_v3.py --target=h200 --json=/tmp/rows.json

One row a program (decode; prefill of each bucket, once more as staged_T where its prompts stage
layers), printed and written as a JSON list. A row says how long compilation took, what device and
host memory the program needs and whether it fits the config's cap, whether donated arrays are
updated in place, every read of the expert bank, computations on the host, and whether copies ahead
(prefetches of experts, staged layers) overlap with compute. Nothing is allocated: the sizes may
exceed this machine's memory.

`--target=h200` and `--target=v5p` need the compilers of the extra `aot`; `--target=cpu` needs
nothing. Every program compiles in a process of its own; those for the TPU wait for each other.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from bench import abstract, command, described
from moecore_jax import families
from moecore_jax.config import RunConfig
from moecore_jax.runtime.program import make_program

_SHOWN = (
  "program",
  "compile_s",
  "lower_s",
  "second_start_s",
  "device_argument_bytes",
  "alias_bytes",
  "temp_bytes",
  "temp_bound_bytes",
  "host_argument_bytes",
  "host_compute_ops",
  "prefetch_overlap",
  "staging_overlap",
  "is_bank_read_by_row",
  "fits",
)


def program_names(config: RunConfig, wanted: Sequence[str]) -> tuple[str, ...]:
  """Returns the wanted programs of an engine, all if none is named.

  Raises:
    ValueError: a program is unknown, or the config describes no model or does not fit it.
  """
  if not config.model.published_config:
    raise ValueError(
      "config field model.published_config: got {}, expected the content of a published "
      "config.json; compiling needs shapes, not weights"
    )
  model = families.model_spec(config.model.published_config)
  residency, engine, _ = config.freeze(model)
  known = abstract.program_names(make_program(model, residency, engine), residency)
  for name in wanted:
    if name not in known:
      raise ValueError(f"--programs: got {name!r}, expected some of {', '.join(known)}")
  return tuple(wanted) or known


class Task(NamedTuple):
  """A program to compile.

  Attributes:
    config: of its engine.
    target: one of described.TARGETS.
    name: one of abstract.program_names.
    hlo_path: file for the program's text, "" to drop it.
  """

  config: RunConfig
  target: str
  name: str
  hlo_path: str = ""


def measure(task: Task) -> dict[str, Any]:
  """Measures one program, and how long a second start takes where that can be seen.

  Returns:
    The row; see bench.aot_row.

  Raises:
    RuntimeError: the compiler failed; with the end of what it said.
  """
  if task.target != "cpu":
    note = "a described device loads no cached program; lower_s is what no cache saves"
    return run([task])[0] | {"second_start_s": None, "second_start_note": note}
  with tempfile.TemporaryDirectory() as cache:
    row, again = (run([task], cache)[0] for _ in range(2))
  return row | {"second_start_s": round(again["lower_s"] + again["compile_s"], 2)}


def run(tasks: Sequence[Task], cache: str = "") -> list[dict[str, Any]]:
  """Compiles programs for one target, one after another, in a process that was started for it.

  Args:
    tasks: programs for the same target.
    cache: folder of a persistent compilation cache, "" for none.

  Returns:
    Their rows.

  Raises:
    RuntimeError: the compiler failed; with the end of what it said.
  """
  environment = described.environment() | {
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  with tempfile.NamedTemporaryFile() as rows, described.one_at_a_time(tasks[0].target):
    done = subprocess.run(
      [sys.executable, "-m", "bench.aot_row", rows.name],
      input=json.dumps([[task.config.to_dict(), *task[1:]] for task in tasks]),
      env=environment,
      cwd=pathlib.Path(__file__).parents[1],
      capture_output=True,
      text=True,
      errors="replace",
      check=False,
    )
    if done.returncode != 0:
      said = done.stderr[-4000:]
      names = ", ".join(task.name for task in tasks)
      code = done.returncode
      raise RuntimeError(f"compiling {names} for {tasks[0].target} failed (exit {code}):\n{said}")
    return json.load(rows)


def measure_all(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Measures the programs that are asked for; yields their rows.

  Raises:
    ValueError: the target's compiler is not installed, or the config describes no model.
  """
  config, target = values["config"].value, values["target"].value
  if target is None:
    raise ValueError(f"--target is missing; choose one of {', '.join(described.TARGETS)}")
  if missing := described.missing_compiler(target):
    raise ValueError(
      f"--target={target} needs the module {missing}, which is not installed; "
      "install the compilers: pip install 'moecore-jax[aot]'"
    )
  config.engine.layer_loop = values["layer_loop"].value or config.engine.layer_loop
  names = program_names(config, values["programs"].value)
  dump = pathlib.Path(values["dump"].value).resolve() if values["dump"].value else None
  if dump:
    dump.mkdir(parents=True, exist_ok=True)
  for name in names:
    hlo_path = dump / f"{target}-{config.engine.layer_loop}-{name}.hlo" if dump else ""
    row = measure(Task(config, target, name, str(hlo_path)))
    print("\n".join(f"{key:>22}  {row[key]}" for key in _SHOWN), end="\n\n", flush=True)
    yield row


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_enum("target", None, described.TARGETS, "device to compile for", flag_values=values)
  flags.DEFINE_enum(
    "layer_loop", None, ("unrolled", "scanned"), "instead of the config's", flag_values=values
  )
  flags.DEFINE_list("programs", [], "only these, such as decode,prefill_512", flag_values=values)
  flags.DEFINE_string("dump", None, "folder for the programs' texts", flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code: 0 done, 2 wrong input. A failure raises."""
  return command.run("bench.aot", __doc__, argv, measure_all, _define, use_config=True)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
