"""`moecore plan`: tables and JSON of what fits, one sentence for what does not."""

import ast
import json
import re
from pathlib import Path

import pytest

from moecore_jax.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = ("deepseek_v4_flash", "glm_5", "qwen3_30b_a3b", "gpt_oss_20b", "olmoe", "mixtral_8x7b")


def test_the_demo_plan_is_printed_and_written(tmp_path, capsys):
  path = tmp_path / "plan.json"
  argv = ["plan", "--config=configs/demo.py", f"--json={path}"]
  assert main.main([*argv, "--config.device.memory_bytes=22000000"]) == 0
  out = capsys.readouterr().out
  for word in ("expert_slots", "budget", "20.90 MB", "longest context", "one slot less in every"):
    assert word in out
  result = json.loads(path.read_text())
  assert result["fits"]
  assert result["needed_bytes"] == sum(result["regions_bytes"].values()) <= result["budget_bytes"]
  assert 12 <= result["most_uniform_slots"] < 32
  assert result["slots"] == [12] * 8


def test_shapes_alone_suffice_and_are_refused_in_numbers(tmp_path, capsys):
  path = tmp_path / "plan.json"
  argv = ["plan", "--config=configs/deepseek_v3.py", f"--json={path}"]
  assert main.main([*argv, "--config.residency.slots_per_layer=64"]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert not path.exists()
  assert err.count("\n") == 1
  for word in (
    "the device needs 3",
    "expert_slots 32",
    "there are 79.80 GB",
    "slots_per_layer to 8",
  ):
    assert word in err


def test_a_missing_checkpoint_is_refused(capsys):
  argv = ["plan", "--config=configs/demo.py", "--config.model.checkpoint=/nowhere"]
  assert main.main(argv) == 2
  assert "the checkpoint folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_a_published_model_tells_its_plan(name, tmp_path):
  path = tmp_path / "plan.json"
  source = CONFIGS / f"{name}.py"
  assert main.main(["plan", f"--config={source}", f"--json={path}"]) == 0
  result = json.loads(path.read_text())
  told = " ".join((ast.get_docstring(ast.parse(source.read_text())) or "").split())
  gb = {name: f"{size / 1e9:.2f}" for name, size in result["regions_bytes"].items()}
  needed, budget = (f"{result[f'{word}_bytes'] / 1e9:.2f}" for word in ("needed", "budget"))
  assert f"need {needed} GB of {budget} GB:" in told
  for words, region in (
    ("KV cache", "kv_cache"),
    ("expert slots", "expert_slots"),
    ("layer buffers", "layer_buffers"),
  ):
    assert f"{words} {gb[region]}" in told
  assert re.search(rf"dense weights( in int8)? {gb['dense_weights']},", told)
  assert f"bank has {result['expert_bank_bytes'] / 1e9:.2f} GB of host memory" in told
