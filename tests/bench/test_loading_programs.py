"""The programs that fill a bank, as compiled for each target: host memory only, and in place."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from bench import described
from tests.bench.conftest import require_compiler

ROOT = pathlib.Path(__file__).parents[2]
ROWS, CHUNK, SHAPE = 4096, 16, (256, 128)
ROW_BYTES = 256 * 128 * 4


@pytest.mark.parametrize("target", described.TARGETS)
def test_a_bank_is_filled_without_passing_through_the_device(target):
  """Zeros alone, moved to the host, would need the whole bank in device memory."""
  require_compiler(target)
  with described.one_at_a_time(target):
    run = subprocess.run(
      [sys.executable, "-m", "tests.bench.test_loading_programs", target],
      cwd=ROOT,
      env=described.environment(),
      capture_output=True,
      text=True,
      check=False,
    )
  assert run.returncode == 0, run.stderr[-4000:]
  first, write = (json.loads(line) for line in run.stdout.splitlines()[-2:])
  for sizes in (first, write):
    assert sizes["temp_bytes"] <= 2 * CHUNK * ROW_BYTES
    assert sizes["host_temp_bytes"] <= CHUNK * ROW_BYTES
    assert sizes["argument_bytes"] < 2 * CHUNK * ROW_BYTES
  assert write["host_argument_bytes"] == ROWS * ROW_BYTES
  assert write["is_aliased"]
  if target != "cpu":  # the CPU knows one memory only
    assert first["output_bytes"] == write["output_bytes"] == 0


def _compile(target: str) -> None:
  """Prints the sizes of both programs; runs in a process of its own."""
  import jax
  import numpy as np

  from moecore_jax import memory

  mesh = jax.sharding.Mesh(np.array([described.tracing_device(target)]), ("x",))
  place = {
    kind: jax.NamedSharding(mesh, jax.P(), memory_kind=kind) for kind in ("device", "pinned_host")
  }
  rows = jax.ShapeDtypeStruct((CHUNK, *SHAPE), np.uint32, sharding=place["device"])
  bank = jax.ShapeDtypeStruct((ROWS, *SHAPE), np.uint32, sharding=place["pinned_host"])
  start = jax.ShapeDtypeStruct((), np.int32, sharding=place["device"])
  for program, args in (
    (memory.first_rows, (rows, ROWS)),
    (memory.write_rows, (bank, rows, start)),
  ):
    compiled = dataclasses.asdict(described.compile_for(target, program, args))
    text = compiled.pop("hlo")
    print(json.dumps(compiled | {"is_aliased": "input_output_alias={ {}: (0" in text}))


if __name__ == "__main__":
  _compile(sys.argv[1])
