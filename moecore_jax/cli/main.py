"""The console script `moecore`: finds the verb, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 failure, 2 the user's fault (one message on stderr, nothing written).
"""

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import jax

import moecore_jax

_VERBS = {
  "eval": "evaluate a model on tasks, under one or several systems; resumable",
  "generate": "stream the completion of one prompt",
  "profile": "record which experts each domain likes, for warm starts",
  "plan": "tell what a config needs of a device's memory, and what would fit",
  "allocate": "give each layer its number of slots, by the hit rates of a trace",
  "convert": "turn a published checkpoint into one that loads straight into host memory",
  "simulate": "replay a routing trace: hit rates of a policy beside LRU and the offline bound",
  "train": "train the demo model from scratch",
}
_OUR_PACKAGES = ("moecore_jax", "checkpoints_convert", "bench", "config_config", "__main__")
_USER_ERRNOS = (
  errno.ENOENT,
  errno.EACCES,
  errno.EPERM,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EEXIST,
  errno.EROFS,
  errno.ENAMETOOLONG,
  errno.ELOOP,
  errno.ENOSPC,
)


def usage() -> str:
  """Returns the overview of the verbs."""
  verbs = "\n".join(f"  {verb:<10} {does}" for verb, does in _VERBS.items())
  return (
    "Mixture-of-experts models whose experts live in host memory.\n\n"
    "usage: moecore VERB --name=value ...\n\n"
    f"{verbs}\n\n"
    "moecore VERB --help tells more. Every verb takes --json=FILE for a machine-readable result.\n"
    "Exit codes: 0 done, 1 failure, 2 wrong input (one message, nothing written)."
  )


def main(argv: Sequence[str]) -> int:
  """Runs `moecore` with arguments.

  Args:
    argv: the arguments after the program's name, the verb first.

  Returns:
    The exit code.
  """
  verb = argv[0] if argv else ""
  if verb in ("--help", "-h", "-help", "help"):
    print(usage())
    return 0
  if verb == "--version":
    print(moecore_jax.__version__)
    return 0
  if verb not in _VERBS:
    near = difflib.get_close_matches(verb, _VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_VERBS)}"
    print(f"moecore: unknown verb {verb!r}; {hint}" if verb else usage(), file=sys.stderr)
    return 2
  try:
    return importlib.import_module(f"moecore_jax.cli.{verb}").main(argv[1:])
  except KeyboardInterrupt:
    print(f"moecore {verb}: interrupted", file=sys.stderr)
    return 1
  except BrokenPipeError:
    raise
  except Exception as e:
    if is_user_fault(e):
      print(f"moecore {verb}: {describe(e)}", file=sys.stderr)
      return 2
    traceback.print_exc()
    return 1


def is_user_fault(error: BaseException) -> bool:
  """Tells wrong input from failure: a ValueError that our code raised, or a file out of reach."""
  if isinstance(error, OSError):
    return error.filename is not None and error.errno in _USER_ERRNOS
  return isinstance(error, ValueError) and _raised_by(error.__traceback__) in _OUR_PACKAGES


def describe(error: BaseException) -> str:
  """Returns an error's message on one line."""
  if isinstance(error, OSError):
    return f"{error.filename}: {error.strerror}"
  return " ".join(str(error).split())


def _raised_by(trace: TracebackType | None) -> str:
  """Returns the top-level package of the innermost frame."""
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] if trace else ""


def run() -> None:
  """Entry point of the console script; compiled programs are kept for the next start."""
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moecore-jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
  try:
    code = main(sys.argv[1:])
    sys.stdout.flush()
  except BrokenPipeError:  # the reader has gone, as in `| head`; nothing is left to flush to it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 1
  sys.exit(code)


if __name__ == "__main__":
  run()
