"""`moecore allocate`: from a trace to a file that a run takes."""

import dataclasses
import json

import numpy as np
import pytest

from moecore_jax import checkpoint, load_config
from moecore_jax.cli import allocate, main
from moecore_jax.runtime.engine import DEMO
from moecore_jax.testing.routing import random_trace
from moecore_jax.traces import Phase, save

DEMO_SHAPE = {"num_layers": 8, "num_experts": 32, "top_k": 4}


def uneven_trace():
  """Two layers that always ask for the same experts beside six that wander."""
  trace = random_trace(300, **DEMO_SHAPE)
  trace.experts[:, :2] = np.arange(4)
  trace.meta["fingerprint"] = "abc"
  return trace


def run(tmp_path, trace, *flags):
  save(trace, tmp_path / "trace.npz")
  argv = ["allocate", "--config=configs/demo.py", f"--trace={tmp_path / 'trace.npz'}"]
  return main.main([*argv, f"--json={tmp_path / 'slots.json'}", *flags])


@pytest.mark.parametrize("kind", ["heuristic", "exact"])
def test_a_trace_becomes_slots_that_a_run_takes(tmp_path, capsys, kind):
  flags = (f"--allocator={kind}", "--step=4")
  assert run(tmp_path, uneven_trace(), *flags) == 0
  out = capsys.readouterr().out
  result = json.loads((tmp_path / "slots.json").read_text())
  slots, rates = result["slots"], result["hit_rates"]
  assert slots == result["allocations"][kind]
  assert sum(slots) <= 8 * 12
  assert result["budget_bytes"] == 8 * 12 * 3 * 128 * 48 * 4
  assert rates["exact"] >= rates["heuristic"] > rates["uniform"]
  assert f"{rates['exact']:.3f}" in out
  assert slots[:2] == [4, 4] and max(slots) > 12
  curves = np.array(result["curves"])
  assert (np.diff(curves) >= -0.02).all()  # not every policy gains by every slot
  given = f"residency.allocation={tmp_path / 'slots.json'}"
  config = load_config("configs/demo.py", (given,))
  assert config.freeze(checkpoint.read_spec(DEMO), "abc")[0].slots == tuple(slots)


def test_a_trace_of_other_weights_is_refused(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(allocate, "known_fingerprint", lambda _: "def")
  assert run(tmp_path, uneven_trace()) == 2
  assert "the trace is of the weights abc, the config's model has def" in capsys.readouterr().err
  assert not (tmp_path / "slots.json").exists()


def without_decoded(trace):
  return dataclasses.replace(trace, phase=np.full_like(trace.phase, Phase.PREFILL))


@pytest.mark.parametrize(
  ("make", "flags", "words"),
  [
    (lambda: random_trace(5), (), "2 layers of 16 experts, top 2; the config's model has 8 of 32"),
    (lambda: without_decoded(random_trace(5, **DEMO_SHAPE)), (), "no decoded tokens"),
    (
      lambda: random_trace(5, **DEMO_SHAPE),
      ("--config.residency.slots_per_layer=3",),
      "residency.slots_per_layer: got 3, expected 4..32",
    ),
    (lambda: random_trace(5, **DEMO_SHAPE), ("--allocator=best",), "allocator"),
  ],
)
def test_faults_are_one_sentence(tmp_path, capsys, make, flags, words):
  assert run(tmp_path, make(), *flags) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert words in err
  assert err.count("\n") == 1
  assert not (tmp_path / "slots.json").exists()
