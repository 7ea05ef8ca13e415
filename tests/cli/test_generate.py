"""`moecore generate`: what is wrong with a checkpoint is told in terms of the command line."""

from moecore_jax.cli import main
from moecore_jax.testing import random_checkpoint


def test_a_checkpoint_without_a_tokenizer(tmp_path, capsys):
  folder = random_checkpoint.write_checkpoint(tmp_path / "checkpoint")
  argv = ["generate", "--config=configs/demo.py", f"--config.model.checkpoint={folder}"]
  argv += ["--config.residency.profiles=", "--config.residency.slots_per_layer=4"]
  assert main.main([*argv, "--prompt=hello"]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert f"{folder} has no tokenizer.json" in err
  assert "copy the model's into the folder" in err
  assert "token ids" not in err
