"""`moecore eval`: the main job, a resumable batch evaluation over tasks and systems."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from moecore_jax.cli import options
from moecore_jax.evaluation import job
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.reporting import table

ABOUT = """Answers every item of the config's tasks under each of its systems, prints the figures.

Writes results.jsonl (one line for each answered item) and metrics.json into the workdir. A run that
was killed goes on where it was when the same command is given again. Exits 1 when requests failed;
their reasons are in results.jsonl. What the figures mean: pydoc moecore_jax.evaluation.metrics
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.
  """
  values = options.parse("eval", ABOUT, argv, _define, required=("workdir",))
  summary = job.run(values.config, Path(values.workdir))
  if values.json:
    write_atomic(Path(values.json), json.dumps(summary, indent=1) + "\n")
  print(table.evaluation(summary))
  if values.layers:
    print(f"\n{table.by_layer(summary)}")
  failed = sum(row["num_errors"] for row in summary["results"])
  if failed:
    print(f"moecore eval: {failed} requests failed, see results.jsonl", file=sys.stderr)
  return 1 if failed else 0


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("workdir", None, "folder of the results", flag_values=values)
  flags.DEFINE_bool("layers", False, "print decode by system and MoE layer", flag_values=values)
