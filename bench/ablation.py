"""The figures of finished evaluations, one row a system: what the README shows of ablations.

    python -m bench.ablation --workdir=/tmp/ablation --json=bench/results/ablation.json

Rows are over all tasks. Times are those of requests on this machine, in milliseconds, medians.
"""

import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from bench import command
from bench.aot_row import machine, versions
from moecore_jax.reporting.table import render

_SHARES = ("accuracy", "hit_rate", "availability_frac", "recall_frac")
_PER_TOKEN = ("misses_per_token", "loads_per_token", "moved_mb_per_token")


def rows(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields a row for each system of a finished evaluation.

  Raises:
    ValueError: the folder holds none.
  """
  path = workdir / "metrics.json"
  if not path.is_file():
    raise ValueError(f"--workdir={workdir}: has no metrics.json; let moecore eval finish there")
  for total in json.loads(path.read_text(encoding="utf-8"))["totals"]:
    times = {name: (total[name] or {}).get("p50") for name in ("ttft_ms", "tpot_ms")}
    figures = {name: total[name] for name in (*_SHARES, *_PER_TOKEN)}
    rounded = {k: v if v is None else round(v, 4) for k, v in {**figures, **times}.items()}
    yield {
      "system": total["system"],
      "n": total["n"],
      **rounded,
      "versions": versions(),
      "machine": machine(),
    }


def _measure(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  found = list(rows(pathlib.Path(values.workdir)))
  names = [*_SHARES, *_PER_TOKEN, "ttft_ms", "tpot_ms"]
  headers = ["system", "accuracy", "hit rate", "available", "recall", "misses/token"]
  headers += ["loads/token", "MB moved/token", "TTFT ms", "TPOT ms"]
  print(render(headers, [[row["system"], *(row[name] for name in names)] for row in found]))
  yield from found


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("workdir", "", "folder of a finished evaluation", flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns the exit code."""
  return command.run("bench.ablation", __doc__, argv, _measure, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
