"""`moecore train` with wrong input: one sentence, exit 2, nothing written."""

import pytest

from moecore_jax.cli import main

TRAIN = "--config=configs/demo_train.py"


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ([TRAIN], "--workdir=WORKDIR is missing"),
    (["--workdir={new}"], "--config=FILE is missing"),
    ([TRAIN + ":large", "--workdir={new}"], "preset 'large' is unknown"),
    (["--config=configs/demo.py", "--workdir={new}"], "published_config is empty"),
    ([TRAIN, "--workdir={new}", "--config.train.num_step=3"], "train.num_steps"),
    ([TRAIN, "--workdir={new}", "--config.train.num_steps=0"], "at least 1"),
    ([TRAIN, "--workdir={new}", "--config.train.row_tokens=64"], "at least 128"),
    ([TRAIN, "--workdir={new}", "--config.train.learning_rate=0"], "above 0"),
    ([TRAIN, "--workdir={new}", "--config.train.capacity_factor=0.5"], "at least 1"),
  ],
)
def test_wrong_input(argv, words, tmp_path, capsys):
  new = tmp_path / "new"
  assert main.main(["train", *(word.replace("{new}", str(new)) for word in argv)]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1, err
  assert err.startswith("moecore train: ")
  assert words in err
  assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_workdir(tmp_path, capsys):
  path = tmp_path / "file"
  path.write_text("kept")
  assert main.main(["train", TRAIN, f"--workdir={path}"]) == 2
  assert "is a file" in capsys.readouterr().err
  assert path.read_text() == "kept"
