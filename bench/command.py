"""The command line that measurements share."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from moecore_jax.cli import options
from moecore_jax.cli.main import describe, is_user_fault


def run(
  name: str,
  about: str | None,
  argv: Sequence[str],
  measure: Callable[[flags.FlagValues], Iterator[dict[str, Any]]],
  define: Callable[[flags.FlagValues], None] = lambda values: None,
  use_config: bool = False,
) -> int:
  """Parses the arguments, measures, and writes the rows to the file of `--json` as they come.

  Args:
    name: of the module, such as "bench.replay".
    about: its docstring, printed by `--help`.
    argv: the arguments.
    measure: yields rows in JSON types; prints what a reader wants to see.
    define: adds the command's flags to the set it is given.
    use_config: the command takes `--config` and its overrides.

  Returns:
    The exit code: 0 done, 2 wrong input, with one sentence on stderr. A failure raises.
  """
  try:
    values = options.parse(name, about or "", argv, define, use_config, program="python -m")
    rows = []
    for row in measure(values):
      rows.append(row)
      if values.json:
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=1) + "\n")
  except Exception as error:
    if not is_user_fault(error):
      raise
    print(f"{name}: {describe(error)}", file=sys.stderr)
    return 2
  return 0
