"""`moecore convert`: turns a published checkpoint into one that loads straight into host memory."""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from checkpoints_convert.convert import DENSE_DTYPES, EXPERT_FORMATS, convert
from moecore_jax.cli import options
from moecore_jax.evaluation.results import write_atomic

ABOUT = """Converts a published checkpoint, streaming, with a check of everything written.

INPUT holds config.json and model.safetensors, or shards with model.safetensors.index.json. OUTPUT
appears when it is whole; what a killed run left in OUTPUT.partial is removed by the next one.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the input is missing or corrupt, or the output exists.
  """
  values = options.parse(
    "convert", ABOUT, argv, _define, use_config=False, required=("input", "output")
  )
  result = convert(
    values["input"].value,
    values["output"].value,
    expert_format=values["expert_format"].value or "",
    dtype=values["dtype"].value or "",
  )
  if values["json"].value:
    write_atomic(Path(values["json"].value), json.dumps(result, indent=1) + "\n")
  print(
    f"{result['output']}: {result['num_bytes'] / 1e6:.1f} MB in {result['num_items']} items, "
    f"experts {result['expert_format']}, {len(result['skipped'])} published tensors not needed"
  )
  return 0


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("input", None, "folder of the published checkpoint", flag_values=values)
  flags.DEFINE_string("output", None, "folder to create", flag_values=values)
  flags.DEFINE_enum(
    "expert_format",
    None,
    list(EXPERT_FORMATS),
    "storage of routed experts; default: bfloat16 if published so, else float32",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "dtype",
    None,
    list(DENSE_DTYPES),
    "storage of dense weights, the routers float32 always; default: each as published",
    flag_values=values,
  )
