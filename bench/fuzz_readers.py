"""Damages tiny published checkpoints at random and reads them: what is not read is refused cleanly.

    python -m bench.fuzz_readers --seconds=600 --seed=0 --json=/tmp/fuzz.json

A case is a checkpoint of the tests, some of its weights in FP8 or FP4 as their families publish
them, with one to three faults in config.json, index, header, bytes or files. It is converted, and
an engine is built from it, in a process of its own. Clean is a refusal by one sentence that
`moecore` would print (exit code 2) and that names the checkpoint or the field, with nothing left
behind; or weights that are finite, are as many as were published, and are the same when they were
converted. Everything else is a finding: another exception, a process that dies, takes 20 seconds
or 2 GB more. Exits 1 where there are findings; `--case=N` runs one case and shows it.
"""

import itertools
import json
import math
import multiprocessing
import pathlib
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bench import command
from bench.aot_row import machine, versions
from bench.damage import Published, damage
from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.cli.main import is_user_fault
from moecore_jax.config import RunConfig
from moecore_jax.runtime.engine import Engine

ORACLES = pathlib.Path(__file__).parents[1] / "tests" / "oracles"
LIMIT_S = 20.0
LIMIT_BYTES = 2 << 30
LIMIT_CHARACTERS = 1000
"""Of a message; what is longer is no sentence."""
OF_THE_CONFIG = ("config field ", "the device needs ")
"""Begin refusals of the run's config, which name no file."""


def run_case(seed: int, case: int, folder: pathlib.Path) -> dict[str, Any]:
  """Runs one case in an empty folder.

  Returns:
    {"subject", "faults"} and what `judge` returns.
  """
  rng = np.random.default_rng([seed, case])
  name = rng.choice(sorted(path.name for path in ORACLES.iterdir()))
  published = Published.read(ORACLES / name, rng)
  return {"subject": str(name), "faults": damage(published, rng)} | judge(published, folder)


def judge(published: Published, folder: pathlib.Path) -> dict[str, str]:
  """Reads a checkpoint that is written to an empty folder.

  Returns:
    {"outcome"}: "read", "refused" or what is wrong; with "text" of the refusal or the traceback.
  """
  source, output = folder / "published", folder / "converted"
  published.write(source)
  before = sorted(folder.rglob("*"))
  refusals = []
  for read in (lambda: _convert(source, output), lambda: _engine(source)):
    try:
      read()
    except Exception as error:
      if unclean := _unclean(error, source):
        text = "".join(traceback.format_exception(error))
        return {"outcome": f"unclean: {unclean}", "text": text}
      refusals.append(str(error))
    else:
      refusals.append("")
  if refusals[0]:
    if sorted(folder.rglob("*")) != before:
      return {"outcome": "a refusal left files behind", "text": refusals[0]}
    is_same = bool(refusals[1])
    outcome = "refused" if is_same else "the engine takes what conversion refuses"
    return {"outcome": outcome, "text": refusals[0]}
  return {"outcome": _compared(source, output), "text": refusals[1]}


def _convert(source: pathlib.Path, output: pathlib.Path) -> None:
  convert(str(source), str(output), expert_format="float32", show_progress=False)


def _engine(source: pathlib.Path) -> None:
  config = RunConfig()
  config.engine.context_tokens = 128
  Engine.from_checkpoint(str(source), config)


def _compared(source: pathlib.Path, output: pathlib.Path) -> str:
  """Returns the outcome of a checkpoint that was converted."""
  published, converted = (
    checkpoint.load(str(path), dtype=jnp.float32, expert_format="float32")
    for path in (source, output)
  )
  leaves, others = (
    jax.tree.leaves((m.params, m.banks, m.mtp_banks)) for m in (published, converted)
  )
  shapes = PublishedCheckpoint(source).keymap.shapes
  got, wanted = sum(leaf.size for leaf in leaves), sum(map(math.prod, shapes.values()))
  if got != wanted:
    return f"wrong shapes: {got} values of {wanted}"
  if not all(np.isfinite(leaf).all() for leaf in leaves):
    return "values that are not finite were read"
  if not all(np.array_equal(a, b) for a, b in zip(leaves, others, strict=True)):
    return "the converted weights differ"
  return "read"


def _unclean(error: Exception, source: pathlib.Path) -> str:
  """Returns what is wrong with a refusal, "" if nothing is."""
  text = str(error)
  if not is_user_fault(error):
    return f"{type(error).__name__} is no fault of the user's"
  if "\n" in text or len(text) > LIMIT_CHARACTERS:
    return "the message is long"
  if str(source) not in text and not text.startswith(OF_THE_CONFIG):
    return "names no file"
  return ""


def _work(seed: int, first: int, pipe: Connection) -> None:
  """Runs cases from the first on, without end; tells of each when it begins and when it ends."""
  jax.config.update("jax_disable_most_optimizations", True)
  with tempfile.TemporaryDirectory() as folder:  # an import or two, and the memory that they take
    Published.read(ORACLES / "mixtral", np.random.default_rng(0)).write(pathlib.Path(folder, "x"))
    _engine(pathlib.Path(folder, "x"))
  resource.setrlimit(
    resource.RLIMIT_AS, (_status("VmSize") + 3 * LIMIT_BYTES, resource.RLIM_INFINITY)
  )
  for case in itertools.count(first):
    pipe.send(case)
    with tempfile.TemporaryDirectory() as folder:
      pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
      start, before = time.perf_counter(), _status("VmRSS")
      row = run_case(seed, case, pathlib.Path(folder))
      seconds, more = time.perf_counter() - start, _status("VmHWM") - before
    if more > LIMIT_BYTES:
      row |= {"outcome": f"takes {more / 1e9:.1f} GB"}
    pipe.send(row | {"case": case, "seconds": round(seconds, 2)})


def _status(name: str) -> int:
  """Returns a number of bytes of /proc/self/status."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(f"{name}:"):
      return int(line.split()[1]) * 1024
  raise RuntimeError(f"/proc/self/status has no {name}")


def fuzz(seed: int, seconds: float) -> Iterator[dict[str, Any]]:
  """Yields the row of each case, in a process that is begun anew when a case ends it."""
  context = multiprocessing.get_context("spawn")
  case, end = 0, time.monotonic() + seconds
  while time.monotonic() < end:
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(seed, case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
      pipe.poll(None)  # the imports
      while time.monotonic() < end:
        case = pipe.recv()
        if not pipe.poll(LIMIT_S):
          yield {"case": case, "outcome": f"takes more than {LIMIT_S:.0f} s"}
          break
        yield pipe.recv()
    except EOFError:
      process.join()
      yield {"case": case, "outcome": f"the process died: {process.exitcode}"}
    finally:
      process.kill()
      process.join()
    case += 1


def _measure(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  if values.case is not None:
    with tempfile.TemporaryDirectory() as folder:
      row = run_case(values.seed, values.case, pathlib.Path(folder))
    print("\n".join(f"{name}: {value}" for name, value in row.items()))
    yield row
    return
  start, outcomes, findings = time.monotonic(), Counter(), []
  for row in fuzz(values.seed, values.seconds):
    outcomes[row["outcome"]] += 1
    if row["outcome"] not in ("read", "refused"):
      findings.append(row)
      print(json.dumps(row), file=sys.stderr, flush=True)
  yield {
    "seed": values.seed,
    "seconds": round(time.monotonic() - start),
    "cases": outcomes.total(),
    "outcomes": dict(outcomes),
    "findings": findings,
    "versions": versions(),
    "machine": machine(),
  }


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_float("seconds", 600.0, "how long cases are begun", flag_values=values)
  flags.DEFINE_integer("seed", 0, "of the cases", flag_values=values)
  flags.DEFINE_integer("case", None, "run this one alone and show it", flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs cases for a while.

  Args:
    argv: the arguments.

  Returns:
    The exit code.
  """
  rows: list[dict[str, Any]] = []

  def measure(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
    for row in _measure(values):
      rows.append(row)
      yield row

  code = command.run("bench.fuzz_readers", __doc__, argv, measure, _define)
  print(json.dumps([{k: v for k, v in row.items() if k != "findings"} for row in rows]))
  return code or int(any(row.get("findings") for row in rows))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
