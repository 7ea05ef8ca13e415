"""Small programs compiled once a session for each target that this Python has a compiler for."""

import json
import pathlib
import subprocess
import sys

import pytest

from bench import described, hlo

_ROOT = pathlib.Path(__file__).parents[2]


class CompiledPrograms:
  """The programs of `programs.py`, compiled for `target`."""

  def __init__(self, target: str, directory: pathlib.Path):
    self.target = target
    self._directory = directory

  def module(self, name: str) -> hlo.Module:
    return hlo.parse((self._directory / f"{name}.hlo").read_text())

  def sizes(self, name: str) -> dict:
    return json.loads((self._directory / f"{name}.json").read_text())


def require_compiler(target: str) -> None:
  if missing := described.missing_compiler(target):
    pytest.skip(f"no compiler for {target}: module {missing} is not installed (extra 'aot')")


@pytest.fixture(scope="session", params=described.TARGETS)
def compiled(request, tmp_path_factory) -> CompiledPrograms:
  """Compiles in a process of its own, because jax here has started on the CPU alone."""
  target = request.param
  require_compiler(target)
  directory = tmp_path_factory.mktemp(target)
  command = [sys.executable, "-m", "tests.bench.programs", target, str(directory)]
  with described.one_at_a_time(target):
    result = subprocess.run(
      command, cwd=_ROOT, env=described.environment(), capture_output=True, text=True, check=False
    )
  assert result.returncode == 0, result.stderr[-4000:]
  return CompiledPrograms(target, directory)
