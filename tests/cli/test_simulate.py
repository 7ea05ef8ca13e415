"""`moecore simulate`: the figures that it prints are those of the replays; wrong input is told."""

import dataclasses
import json

import numpy as np
import pytest

from moecore_jax import traces
from moecore_jax.cli import main
from moecore_jax.testing import routing

TRACE = routing.random_trace(150, num_layers=2, num_experts=12, top_k=3, num_sequences=3)


@pytest.fixture
def path(tmp_path):
  traces.save(TRACE, tmp_path / "trace.npz")
  return tmp_path / "trace.npz"


def test_figures(path, tmp_path, capsys):
  result = tmp_path / "result.json"
  argv = ["simulate", f"--trace={path}", "--policy=rhac", "--slots=4,12", f"--json={result}"]
  assert main.main(argv) == 0
  out = capsys.readouterr().out
  assert "150 tokens, 2 layers, protected counting, cold start" in out
  written = json.loads(result.read_text())
  first, last = written["results"]
  assert (first["slots"], last["slots"]) == (4, 12)
  for name, policy in (("policy", "rhac"), ("lru", "lru"), ("belady", "belady")):
    replayed = traces.replay(TRACE, policy, 4)
    assert first[f"{name}_hit_rate"] == pytest.approx(replayed.mean_hit_rate)
    assert first[f"{name}_hit_rate_by_layer"] == pytest.approx(replayed.hit_rate.tolist())
    assert f"{replayed.mean_hit_rate:.3f}" in out
  assert 0 < first["gap_closed_frac"] < 1
  assert last["gap_closed_frac"] is None
  assert written["num_experts"] == [12, 12]


def test_parts_of_a_trace(tmp_path, capsys):
  """Only decoded tokens by default, or those asked for; only the first of them."""
  phase = np.repeat(np.array([0, 1], np.uint8), 75)
  traces.save(dataclasses.replace(TRACE, phase=phase), tmp_path / "a.npz")
  argv = ["simulate", f"--trace={tmp_path / 'a.npz'}", "--policy=lru", "--slots=4"]
  for words, count in (([], 75), (["--phase=all"], 150), (["--phase=all", "--tokens=9"], 9)):
    assert main.main([*argv, *words, "--counting=sequential"]) == 0
    assert f"{count} tokens, 2 layers, sequential" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--policy=lru", "--slots=4"], "--trace=TRACE is missing"),
    (["--trace={path}", "--slots=4"], "--policy=POLICY is missing"),
    (["--trace={path}", "--policy=lru"], "--slots=SLOTS is missing"),
    (["--trace={path}", "--policy=mru", "--slots=4"], "policy"),
    (["--trace={path}", "--policy=lru", "--slots=4,x"], "--slots=4,x"),
    (["--trace={path}", "--policy=lru", "--slots=2"], "expected 3..12; with fewer"),
    (["--trace={path}", "--policy=lru", "--slots=13"], "expected 3..12"),
    (["--trace={path}", "--policy=lru", "--slots=4", "--phase=prefill"], "no prefill tokens"),
    (["--trace={path}", "--policy=lru", "--slots=4", "--tokens=0"], "tokens"),
    (["--trace=/nowhere.npz", "--policy=lru", "--slots=4"], "/nowhere.npz"),
    (["--trace=pyproject.toml", "--policy=lru", "--slots=4"], "pyproject.toml: is no trace"),
  ],
)
def test_wrong_input(words, message, path, capsys):
  assert main.main(["simulate", *(word.replace("{path}", str(path)) for word in words)]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1, err
  assert err.startswith("moecore simulate: ")
  assert message in err
