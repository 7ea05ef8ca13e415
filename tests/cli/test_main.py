"""The command line: verbs are found, and faults are told apart from failures."""

import subprocess
import sys
from pathlib import Path

import pytest

from moecore_jax.cli import main


def test_help_names_every_verb(capsys):
  assert main.main(["--help"]) == 0
  out = capsys.readouterr().out
  for verb in ("eval", "generate", "profile", "plan", "allocate", "convert", "train"):
    assert f"  {verb} " in out


@pytest.mark.parametrize(
  "verb", ["eval", "generate", "profile", "plan", "allocate", "convert", "train"]
)
def test_every_verb_has_help(verb, capsys):
  with pytest.raises(SystemExit) as e:
    main.main([verb, "--help"])
  assert e.value.code in (0, None)
  out = capsys.readouterr().out
  assert f"moecore {verb}" in out
  assert "--json" in out


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ([], "usage: moecore VERB"),
    (["evl"], "did you mean eval?"),
    (["frobnicate"], "use one of eval, generate"),
  ],
)
def test_unknown_verbs(argv, words, capsys):
  assert main.main(argv) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert words in err


def _raise_here():
  raise ValueError("x must be\n  positive")


def _open_missing():
  Path("/nowhere/at/all").read_text()


def _break():
  raise RuntimeError("broken")


@pytest.mark.parametrize(
  ("function", "package", "fault"),
  [
    (_raise_here, "moecore_jax", True),
    (_raise_here, "somebody", False),
    (_open_missing, "somebody", True),
    (_break, "moecore_jax", False),
  ],
)
def test_faults_and_failures_are_told_apart(function, package, fault, monkeypatch):
  """Only what our own code refuses is the user's fault; other ValueErrors are failures."""
  monkeypatch.setitem(function.__globals__, "__name__", f"{package}.module")
  with pytest.raises((ValueError, OSError, RuntimeError)) as e:
    function()
  assert main.is_user_fault(e.value) == fault


def test_messages_are_one_line():
  with pytest.raises(ValueError, match="positive") as e:
    _raise_here()
  assert main.describe(e.value) == "x must be positive"
  with pytest.raises(OSError, match="nowhere") as e:
    _open_missing()
  assert main.describe(e.value) == "/nowhere/at/all: No such file or directory"


def test_exit_codes_reach_the_shell():
  run = subprocess.run(
    [sys.executable, "-m", "moecore_jax.cli.main", "evl"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 2
  assert run.stderr == "moecore: unknown verb 'evl'; did you mean eval?\n"
