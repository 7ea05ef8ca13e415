"""Measures time and peak host memory of loading and converting a generated checkpoint.

    python -m bench.loading [--bank_gb=4.3] [--vocab=131072 --hidden=4096] [--json=FILE]
    python -m bench.loading --bank_gb=9.8 --cases=convert,resume --rounds=3 --json=FILE

Writes a random checkpoint in published format, then loads it, converts it and loads what was
converted, each in a process of its own, prints one JSON row for each and deletes the files. Peaks
are VmHWM, everything included: interpreter, libraries, dense weights; files are read by plain
reads, so that the page cache is not in it. On the CPU the bank is in this memory too, and so are
the dense weights.

With `--rounds` the published files are copied before each conversion, by `cp -r` and `sync`: a
conversion syncs and reads back what it writes. Both begin with nothing of the files in the page
cache. `copy_speed_frac` is a round's time of copying over its time of converting, the median of
all; `seconds` is that of this round. With the case `resume` a conversion is killed (SIGKILL) when
half of the bytes are written, and runs again.

Bounds: a load peaks at 1.15 banks, the dense weights of a device whose memory is the host's not
counted; a conversion at 2 GB, whatever the size of the output, and it has half the speed of
copying. Exits 1 when a bound does not hold. `other_bytes` of a load is what lies beside bank, dense
weights, and what was there before (0.2 GB of libraries): chunks on their way.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench.aot_row import machine, versions

LOAD_BOUND_BANKS = 1.15
CONVERT_BOUND_BYTES = 2_000_000_000
COPY_BOUND_FRAC = 0.5
CASES = ("load_published", "convert", "load_converted")
RESUME = "resume"


def config_of(bank_bytes: float, dtype: str, vocab: int, hidden: int) -> dict[str, Any]:
  """Returns a published config whose bank has about this size."""
  from moecore_jax.models.experts import expert_bytes
  from moecore_jax.specs import ExpertGroup
  from moecore_jax.testing.random_checkpoint import tiny_config

  width, experts = 512, 64
  group = ExpertGroup((0,), experts, 1, hidden, width)
  layers = max(1, round(bank_bytes / (experts * expert_bytes(group, dtype))))
  return tiny_config(
    hidden_size=hidden,
    moe_intermediate_size=width,
    intermediate_size=2048,
    n_routed_experts=experts,
    num_hidden_layers=1 + layers,
    num_nextn_predict_layers=0,
    vocab_size=vocab,
    q_lora_rank=256,
    kv_lora_rank=128,
  )


def run_case(case: str, folder: pathlib.Path, dtype: str) -> dict[str, Any]:
  """Runs one case in this process.

  Args:
    case: "generate", RESUME or one of CASES.
    folder: holds `published` and `converted`.
    dtype: of the published weights and of the bank.

  Returns:
    Sizes in bytes and times in seconds.
  """
  import jax

  from checkpoints_convert.convert import convert
  from moecore_jax import checkpoint
  from moecore_jax.checkpoint.template import total_bytes
  from moecore_jax.testing.random_checkpoint import write_checkpoint

  published, converted = folder / "published", folder / "converted"
  if case == "generate":
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(published, config, dtype=dtype, shard_bytes=200 << 20)
    return {}
  jax.device_put(0.0).block_until_ready()  # starts the backend
  before, start = _peak_rss_bytes(), time.perf_counter()
  is_conversion = case in ("convert", RESUME)
  if is_conversion:
    result = convert(str(published), str(converted))
    row = {name: result[name] for name in ("num_bytes", "num_items", "num_resumed")}
  else:
    source = published if case == "load_published" else converted
    loaded = checkpoint.load(str(source), dtype=dtype, expert_format=dtype)
    row = {"bank_bytes": total_bytes(loaded.banks), "dense_bytes": total_bytes(loaded.params)}
  seconds, peak = time.perf_counter() - start, _peak_rss_bytes()
  row |= {"seconds": round(seconds, 2), "rss_before_bytes": before, "peak_rss_bytes": peak}
  if is_conversion:
    return row | {"bound_bytes": CONVERT_BOUND_BYTES, "ok": peak <= CONVERT_BOUND_BYTES}
  dense_bytes = row["dense_bytes"] if jax.default_backend() == "cpu" else 0
  frac = (peak - dense_bytes) / row["bank_bytes"]
  return row | {
    "other_bytes": peak - before - row["bank_bytes"] - dense_bytes,
    "peak_over_bank": round(peak / row["bank_bytes"], 3),
    "peak_without_dense_over_bank": round(frac, 3),
    "bound": LOAD_BOUND_BANKS,
    "ok": frac <= LOAD_BOUND_BANKS,
  }


def _peak_rss_bytes() -> int:
  """Returns the peak of this process alone; what getrusage tells includes the parent's."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmHWM:"):
      return int(line.split()[1]) * 1024
  raise RuntimeError("/proc/self/status has no VmHWM")


def measure(case: str, folder: pathlib.Path, dtype: str, rounds: int) -> dict[str, Any]:
  """Runs one case in a process of its own; with rounds, a conversion in turn with copying."""
  if case == RESUME:
    shutil.rmtree(folder / "converted", ignore_errors=True)
    _kill_halfway(folder, dtype)
  if case != "convert" or not rounds:
    return _measured(_start(case, folder, dtype))
  rows, copied = [], []
  for _ in range(rounds):
    shutil.rmtree(folder / "converted", ignore_errors=True)
    copied.append(_copy_seconds(folder))
    _leave_page_cache(folder / "published")
    rows.append(_measured(_start(case, folder, dtype)))
  fracs = [copy / row["seconds"] for copy, row in zip(copied, rows, strict=True)]
  frac = statistics.median_low(fracs)
  i = fracs.index(frac)
  return rows[i] | {
    "copy_seconds": round(copied[i], 2),
    "copy_speed_fracs": [round(f, 3) for f in fracs],
    "copy_speed_frac": round(frac, 3),
    "copy_bound_frac": COPY_BOUND_FRAC,
    "ok": all(row["ok"] for row in rows) and frac >= COPY_BOUND_FRAC,
  }


def _start(case: str, folder: pathlib.Path, dtype: str) -> subprocess.Popen:
  command = [sys.executable, "-m", "bench.loading", f"--case={case}"]
  command += [f"--folder={folder}", f"--dtype={dtype}"]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _measured(run: subprocess.Popen) -> dict[str, Any]:
  out, _ = run.communicate()
  if run.returncode:
    raise RuntimeError(f"{run.args} ended with {run.returncode}")
  return json.loads(out)


def _kill_halfway(folder: pathlib.Path, dtype: str) -> None:
  """Kills a conversion when half of what is published is written."""
  half = _num_bytes(folder / "published") / 2
  run = _start("convert", folder, dtype)
  while run.poll() is None and _num_bytes(folder / "converted.partial") < half:
    time.sleep(0.1)
  run.kill()
  run.communicate()


def _copy_seconds(folder: pathlib.Path) -> float:
  _leave_page_cache(folder / "published")
  start = time.perf_counter()
  subprocess.run(["cp", "-r", folder / "published", folder / "copy"], check=True)
  os.sync()
  seconds = time.perf_counter() - start
  shutil.rmtree(folder / "copy")
  return seconds


def _leave_page_cache(folder: pathlib.Path) -> None:
  from moecore_jax.checkpoint.store import leave_page_cache

  os.sync()
  leave_page_cache(folder)


def _num_bytes(folder: pathlib.Path) -> int:
  total = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      with contextlib.suppress(FileNotFoundError):  # renamed while it is written
        total += os.stat(os.path.join(parent, name)).st_size
  return total


def main(argv: Sequence[str]) -> int:
  """Runs all cases, or one of them for the parent process.

  Args:
    argv: the arguments.

  Returns:
    The exit code.
  """
  parser = argparse.ArgumentParser(
    prog="python -m bench.loading",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--bank_gb", type=float, default=4.3, help="size of the bank, 1e9 bytes")
  parser.add_argument("--vocab", type=int, default=4096, help="rows of embedding and head")
  parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
  parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
  parser.add_argument("--folder", help="where the files go; default: the system's own")
  parser.add_argument("--json", help="append the rows to this file")
  parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}, {RESUME}")
  parser.add_argument("--rounds", type=int, default=0, help="conversions in turn with copying")
  parser.add_argument("--case", choices=("generate", *CASES, RESUME), help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.case:
    print(json.dumps(run_case(args.case, pathlib.Path(args.folder), args.dtype)))
    return 0
  ok = True
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # delete the files then too
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    config = config_of(args.bank_gb * 1e9, args.dtype, args.vocab, args.hidden)
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    _measured(_start("generate", pathlib.Path(folder), args.dtype))
    for case in args.cases.split(","):
      row = {"case": case, "dtype": args.dtype, "vocab": args.vocab, "hidden": args.hidden}
      row |= measure(case, pathlib.Path(folder), args.dtype, args.rounds)
      orbax = importlib.metadata.version("orbax-checkpoint")
      row |= {"versions": versions() | {"orbax-checkpoint": orbax}, "machine": machine()}
      ok &= row["ok"]
      print(json.dumps(row), flush=True)
      if args.json:
        with open(args.json, "a", encoding="utf-8") as f:
          f.write(json.dumps(row) + "\n")
  return 0 if ok else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
