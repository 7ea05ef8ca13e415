"""`moecore train`: trains the demo model from scratch."""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from moecore_jax.cli import options
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.training import trainer

ABOUT = """Trains a model on generated text and exports it in published format.

A run that was killed goes on from its last checkpoint when the same command is given again.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.
  """
  values = options.parse("train", ABOUT, argv, _define, required=("workdir",))
  result = trainer.run(values.config, Path(values.workdir))
  if values.json:
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  print(json.dumps(result))
  return 0


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
