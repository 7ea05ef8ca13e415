"""Flags of one verb: its own, and a config where it takes one."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from moecore_jax.config import RunConfig, leaves
from moecore_jax.config_loading import define_config_flag, parse_flags


def parse(
  verb: str,
  about: str,
  argv: Sequence[str],
  define: Callable[[flags.FlagValues], None],
  use_config: bool = True,
  required: Sequence[str] = (),
  program: str = "moecore",
) -> flags.FlagValues:
  """Parses the arguments of a verb; `--help` prints what it takes and exits.

  Args:
    verb: the verb's name.
    about: what it does, printed by `--help`.
    argv: the arguments after the verb.
    define: adds the verb's flags to the set it is given.
    use_config: the verb takes `--config` and its overrides.
    required: names of flags that must be given a value.
    program: what the verb belongs to.

  Returns:
    The parsed flags; `values.config` is a validated RunConfig.

  Raises:
    ValueError: a flag is unknown, missing or malformed.
  """
  command = f"{program} {verb}"
  argv = [command, *argv]
  values = flags.FlagValues()
  define(values)
  flags.DEFINE_string(
    "json", None, "write the machine-readable result to this file", flag_values=values
  )
  if use_config:
    define_config_flag(values, argv)
  if any(word in ("--help", "-h", "-help") for word in argv):
    _help(command, about, values, use_config)
  parse_flags(values, argv)
  for name in required:
    if not values[name].value:
      fault = "is missing" if values[name].value is None else "is empty"
      raise ValueError(f"--{name}={name.upper()} {fault}; see {command} --help")
  if values.json:
    check_writable("json", values.json)
  return values


def check_writable(flag: str, path: str) -> None:
  """Refuses the file of a flag that cannot be written, before there is anything to write.

  Raises:
    ValueError: says why.
  """
  folder = os.path.dirname(path) or "."
  if os.path.isdir(path):
    raise ValueError(f"--{flag}={path}: is a folder; name a file")
  if not os.path.isdir(folder):
    raise ValueError(f"--{flag}={path}: its folder does not exist; create it first")
  if not os.access(folder, os.W_OK):
    raise ValueError(f"--{flag}={path}: its folder cannot be written; choose another")


def _help(command: str, about: str, values: flags.FlagValues, use_config: bool) -> NoReturn:
  lines = [about.strip(), "", f"usage: {command} --name=value ...", ""]
  for name in sorted(values):
    default = values[name].default
    suffix = f" (default {default!r})" if default not in (None, "") else ""
    lines.append(f"  --{name}: {values[name].help}{suffix}")
  if use_config:
    lines += [
      "",
      "Fields of the config, overridden by --config.FIELD=VALUE (defaults before FILE):",
    ]
    lines += [
      f"  {name} = {value!r}"
      for name, _, value in leaves(RunConfig())
      if not isinstance(value, dict)
    ]
    lines += ["", "Their meanings: pydoc moecore_jax.config"]
  print("\n".join(lines))
  sys.exit(0)
