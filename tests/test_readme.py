"""The README's commands and names are those of the repository."""

import re
import tomllib
from pathlib import Path

import moecore_jax
from moecore_jax.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_two_set_up_commands_with_environments_of_their_own():
  commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
  assert len(commands) == 2
  environments = [command.split()[3] for command in commands]
  assert len(set(environments)) == 2
  for command, environment in zip(commands, environments, strict=True):
    assert all(part.startswith(environment) for part in command.split(" && ")[1:])
  assert "moecore eval" in commands[0]
  assert "pytest -n auto" in commands[1]


def test_named_verbs_and_files_exist():
  verbs = re.findall(r"^(?:\S*/)?moecore (\w+) --", README, re.MULTILINE)
  assert verbs
  assert all(f"  {verb} " in main.usage() for verb in verbs)
  for path in re.findall(r"--config=([\w/]+\.py)", README):
    assert (ROOT / path).is_file(), path
  for row in re.findall(r"^\| (`[^|]*`) \|", README, re.MULTILINE):
    for name in re.findall(r"`([^`]+)`", row):
      assert (ROOT / name).exists() or (ROOT / "moecore_jax" / name).exists(), name


def test_version_is_stated_once():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  assert project["version"] == moecore_jax.__version__
