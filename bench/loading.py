"""Measures time and peak host memory of loading and converting a generated checkpoint.

    python -m bench.loading [--bank_gb=4.3] [--vocab=131072 --hidden=4096] [--json=FILE]

Writes a random checkpoint in published format, then loads it, converts it and loads what was
converted, each in a process of its own, prints one JSON row for each and deletes the files. Peaks
are VmHWM, everything included: interpreter, libraries, dense weights; files are read by plain
reads, so that the page cache is not in it. On the CPU the bank is in this memory too, and so are
the dense weights.

Bounds: a load peaks at 1.15 banks, the dense weights of a device whose memory is the host's not
counted; a conversion at 2 GB, whatever the size of the output. Exits 1 when a bound does not hold.
`other_bytes` of a load is what lies beside bank, dense weights, and what was there before (0.2 GB
of libraries): chunks on their way.
"""

import argparse
import importlib.metadata
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench.aot_row import machine, versions

LOAD_BOUND_BANKS = 1.15
CONVERT_BOUND_BYTES = 2_000_000_000
CASES = ("load_published", "convert", "load_converted")


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
    case: "generate" or one of CASES.
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
  if case == "convert":
    result = convert(str(published), str(converted))
    row = {"output_bytes": result["num_bytes"]}
  else:
    source = published if case == "load_published" else converted
    loaded = checkpoint.load(str(source), dtype=dtype, expert_format=dtype)
    row = {"bank_bytes": total_bytes(loaded.banks), "dense_bytes": total_bytes(loaded.params)}
  seconds, peak = time.perf_counter() - start, _peak_rss_bytes()
  row |= {"seconds": round(seconds, 2), "rss_before_bytes": before, "peak_rss_bytes": peak}
  if case == "convert":
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
  parser.add_argument("--case", choices=("generate", *CASES), help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.case:
    print(json.dumps(run_case(args.case, pathlib.Path(args.folder), args.dtype)))
    return 0
  ok = True
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # delete the files then too
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    config = config_of(args.bank_gb * 1e9, args.dtype, args.vocab, args.hidden)
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    for case in ("generate", *CASES):
      command = [sys.executable, "-m", "bench.loading", f"--case={case}"]
      command += [f"--folder={folder}", f"--dtype={args.dtype}"]
      run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
      if case == "generate":
        continue
      row = {"case": case, "dtype": args.dtype, "vocab": args.vocab, "hidden": args.hidden}
      row |= json.loads(run.stdout)
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
