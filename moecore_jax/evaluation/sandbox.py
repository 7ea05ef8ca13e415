"""Runs a generated program with its assertions in a process of its own, with limits."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 10.0
MAX_CPU_S = 4
MAX_MEMORY_BYTES = 512 << 20
MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 32

# The child limits itself before it runs the program: a fork with a hook is unsafe beside threads.
_RUNNER = f"""
import resource, sys
for name, value in (
    ("CPU", {MAX_CPU_S}),
    ("AS", {MAX_MEMORY_BYTES}),
    ("FSIZE", {MAX_FILE_BYTES}),
    ("NOFILE", {MAX_OPEN_FILES}),
    ("CORE", 0),
):
  resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
program, mark = sys.stdin.read(), sys.argv.pop()
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
with open("done", "w") as f:
  f.write(mark)
"""


def passes(program: str, timeout_s: float = TIMEOUT_S) -> bool:
  """Tells whether a Python program runs to its end without an error.

  The process is isolated from our environment variables, our folder (`python -I`) and installed
  packages (`-S`), starts in an empty temporary folder, and has limits on CPU time, memory, file
  size, open files and wall time.
  The limits stop a model's accidents; they are no defence against an adversary, who needs a
  container around the whole evaluation.

  Args:
    program: source text; one that ends early, even with exit code 0, does not pass.
    timeout_s: wall time.
  """
  mark = secrets.token_hex(16)
  with tempfile.TemporaryDirectory(prefix="moecore-code-") as folder:
    process = subprocess.Popen(
      [sys.executable, "-I", "-S", "-B", "-c", _RUNNER, mark],
      cwd=folder,
      env={},
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    try:
      process.communicate(program.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
      return False
    finally:
      _kill_group(process)
    done = Path(folder, "done")
    return process.returncode == 0 and done.is_file() and done.read_text() == mark


def _kill_group(process: subprocess.Popen) -> None:
  """Ends the process and whatever it started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
