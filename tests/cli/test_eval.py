"""`moecore eval` and `moecore generate` with wrong input: one sentence, exit 2, nothing written."""

import subprocess
import sys

import pytest

from moecore_jax.cli import main

DEMO = "--config=configs/demo.py"
PROMPT = "--prompt=Tom has 3 apples."


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["eval", "--workdir={new}"], "--config=FILE is missing"),
    (["eval", DEMO], "--workdir=WORKDIR is missing"),
    (["eval", DEMO, "--workdir={new}", "--wrkdir=x"], "wrkdir"),
    (["eval", DEMO, "--workdir={new}", "stray"], "unexpected argument 'stray'"),
    (["eval", DEMO, "--workdir={new}", "--config.residency.slotz=3"], "residency.slots"),
    (["eval", "--config.engine.batch_size=3", DEMO, "--workdir={new}"], "before a value for"),
    (["eval", DEMO, "--workdir={new}", "--config.engine.batch_size=x"], "engine.batch_size=x"),
    (["eval", DEMO, "--workdir={new}", "--config.residency.slots_per_layer=0"], "at least 1"),
    (["eval", DEMO, "--workdir={new}", "--config.residency.slots_per_layer=33"], "1..32"),
    (["eval", DEMO, "--workdir={new}", "--config.eval.tasks=maths"], "maths"),
    (["eval", DEMO, "--workdir={new}", "--config.eval.systems=lod,fast"], "fast"),
    (["eval", "--config=configs/none.py", "--workdir={new}"], "configs/none.py"),
    (["eval", DEMO + ":fast", "--workdir={new}"], "preset 'fast' is unknown"),
    (["eval", DEMO, "--workdir={new}", "--config.model.checkpoint=/nowhere"], "/nowhere"),
    (["eval", DEMO, "--workdir={new}", "--json=/nowhere/x.json"], "/nowhere/x.json"),
    (["generate", DEMO], "--prompt=PROMPT is missing"),
    (["generate", DEMO, "--prompt="], "--prompt=PROMPT is empty"),
    (["generate", DEMO, PROMPT, "--domain=cooking"], "cooking: got an unknown domain; choose one"),
    (["generate", DEMO + ":lod", PROMPT, "--domain=cooking"], "choose one of math, qa"),
    (["generate", DEMO, PROMPT, "--config.residency.profiles=/nowhere"], "residency.profiles"),
    (["generate", DEMO, PROMPT, "--max_new_tokens=0"], "max_new_tokens"),
    (["generate", DEMO, PROMPT, "--config.residency.slots=(8,8)"], "residency.slots"),
    (["generate", DEMO, "--prompt=" + "7 apples and " * 200], "256"),
  ],
)
def test_wrong_input(argv, words, tmp_path, capsys):
  new = tmp_path / "new"
  assert main.main([word.replace("{new}", str(new)) for word in argv]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1, err
  assert err.startswith(f"moecore {argv[0]}: ")
  assert words in err
  assert list(tmp_path.iterdir()) == []


def test_wrong_input_in_a_process_of_its_own(tmp_path):
  """Nothing that a library prints or a parser does at exit gets in between."""
  command = [sys.executable, "-m", "moecore_jax.cli.main", "eval", DEMO]
  command += [f"--workdir={tmp_path / 'new'}", "--config.residency.slots_per_layer=99"]
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  assert run.returncode == 2
  assert run.stdout == ""
  assert run.stderr.count("\n") == 1
  assert "residency.slots_per_layer: got 99" in run.stderr
  assert list(tmp_path.iterdir()) == []
