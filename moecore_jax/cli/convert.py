"""`moecore convert`: a published checkpoint into one that loads straight into host memory."""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from checkpoints_convert import convert
from moecore_jax.cli import options
from moecore_jax.evaluation.results import write_atomic

ABOUT = """Converts a published checkpoint (config.json, safetensors, tokenizer.json), streaming.

The output is read back and compared before it gets its name: a folder of that name is always whole.
Until then it is OUTPUT.partial; a run that was killed goes on there when it is given again.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.
  """
  values = options.parse(
    "convert", ABOUT, argv, _define, use_config=False, required=("input", "output")
  )
  result = convert.convert(
    values.input, values.output, expert_format=values.quantization, dtype=values.dtype
  )
  if values.json:
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  print(
    f"{result['output']}: {result['num_bytes'] / 1e6:.1f} MB, "
    f"experts in {result['expert_format']}, {len(result['skipped'])} published weights left out"
  )
  return 0


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("input", None, "folder of the published checkpoint", flag_values=values)
  flags.DEFINE_string("output", None, "folder to create", flag_values=values)
  flags.DEFINE_enum(
    "quantization",
    "",
    ["", *convert.EXPERT_FORMATS],
    "storage of routed experts; empty: float32 or bfloat16, as published",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "dtype",
    "",
    ["", *convert.DENSE_DTYPES],
    "storage of all other weights; empty: as published",
    flag_values=values,
  )
