"""Config files and their overrides, from Python and from the command line.

A config is named `FILE` or `FILE:PRESET`; the file's `get_config(preset)` returns a `RunConfig`.
The command line and `load_config` take the same path through `ml_collections.config_flags`, whose
errors are turned into one sentence each.
"""

import difflib
import os
import re
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from moecore_jax.config import RunConfig, leaves

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


def load_config(config: str, overrides: Sequence[str] = ()) -> RunConfig:
  """Loads and validates a config.

  Args:
    config: `FILE` or `FILE:PRESET`, the file relative to the working directory.
    overrides: assignments such as "residency.slots_per_layer=4", applied in order; a tuple that is
      assigned several times gathers all elements.

  Returns:
    A config of its own, which may be changed further.

  Raises:
    ValueError: the file, the preset, a field or a value is not what it should be.
  """
  values = flags.FlagValues()
  argv = ["load_config", f"--config={config}", *(f"--config.{item}" for item in overrides)]
  define_config_flag(values, argv)
  parse_flags(values, argv)
  return values.config


def define_config_flag(values: flags.FlagValues, argv: Sequence[str]) -> None:
  """Adds `--config=FILE[:PRESET]` with its `--config.FIELD=VALUE` overrides to a set of flags.

  Args:
    values: the flags to add to.
    argv: the command line that `values` is going to parse, the program's name first.
  """
  config_flags.DEFINE_config_file(
    "config",
    help_string="FILE or FILE:PRESET, such as configs/demo.py:lod",
    flag_values=values,
    lock_config=True,
    sys_argv=list(argv),
  )


def parse_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
  """Parses a command line; a config among the flags is validated.

  Args:
    values: the flags.
    argv: the command line, the program's name first.

  Raises:
    ValueError: a flag, a config field or a value is unknown, missing or malformed; one sentence.
  """
  path = _check_config_arguments(argv) if "config" in values else ""
  # config_flags loads every file as the same module, over what the file before it defined.
  sys.modules.pop("config_config", None)
  try:
    rest = values(list(argv))
  except flags.Error as e:
    where = f"{path}: " if str(e).startswith("flag --config=") else ""
    raise ValueError(where + _last_line(e)) from e
  except Exception as e:  # whatever the code of the config file raises
    raise ValueError(f"{path}: {type(e).__name__}: {_last_line(e)}") from e
  if len(rest) > 1:
    raise ValueError(f"unexpected argument {rest[1]!r}; options are written --name=value")
  if "config" in values:
    config = values.config
    if not isinstance(config, RunConfig):
      raise ValueError(f"{path}: get_config() gave a {type(config).__name__}, expected a RunConfig")
    _split_words(config)
    config.validate()


def _check_config_arguments(argv: Sequence[str]) -> str:
  """Checks what config_flags would be obscure about; returns the path of the config."""
  known = [name for name, _, _ in leaves(RunConfig())]
  path = None
  for i, argument in enumerate(argv):
    if argument == "--":
      break
    if argument in ("--config", "-config"):
      path = argv[i + 1] if i + 1 < len(argv) else ""
    elif argument.startswith(("--config=", "-config=")):
      path = argument.split("=", 1)[1]
    match = _OVERRIDE.match(argument)
    if match and match[1] not in known:
      inside = [name for name in known if name.startswith(match[1] + ".")]
      near = inside or difflib.get_close_matches(match[1], known, n=3, cutoff=0.5)
      hint = f"did you mean {' or '.join(near[:3])}?" if near else "see moecore VERB --help"
      raise ValueError(f"config field {match[1]} does not exist; {hint}")
  if path is None:
    raise ValueError("--config=FILE is missing; try --config=configs/demo.py")
  if not os.path.isfile(path.split(":", 1)[0]):
    raise ValueError(f"--config={path}: there is no file {path.split(':', 1)[0]!r}")
  return path


def _split_words(config: RunConfig) -> None:
  """Lets tuples of names be written a,b on the command line."""
  for name in ("tasks", "systems"):
    words = getattr(config.eval, name)
    if all(isinstance(word, str) for word in words):
      parts = (part.strip() for word in words for part in word.split(","))
      setattr(config.eval, name, tuple(part for part in parts if part))


def _last_line(error: Exception) -> str:
  """One sentence out of an error that may carry a whole traceback."""
  text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
  lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
  return re.sub(r"^\w*(Error|Exception): ", "", lines[-1]) if lines else type(error).__name__
