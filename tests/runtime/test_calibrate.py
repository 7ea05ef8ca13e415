"""The arithmetic of a calibration, and one calibration of a tiny model."""

import json

import pytest

from moecore_jax.runtime import calibrate
from moecore_jax.runtime.calibrate import LayerTimes
from moecore_jax.specs import EngineSpec, ResidencySpec
from moecore_jax.testing import tiny


def test_the_link_is_found_from_its_transfers():
  points = [(size, 2e-5 + size / 50e9) for size in (1 << 20, 1 << 22, 1 << 24)]
  link = calibrate.fit_link(points)
  assert link.tau_s == pytest.approx(2e-5)
  assert link.bytes_per_s == pytest.approx(50e9)
  assert calibrate.fit_link([(1000, 1e-6), (3000, 4e-6)]).tau_s == 0.0
  with pytest.raises(RuntimeError, match="larger transfers did not take longer"):
    calibrate.fit_link([(1000, 2e-6), (3000, 1e-6)])


def test_windows_reach_from_a_prediction_to_the_routing():
  """Layers 1, 3 and 4 have experts; layer 2 lies between a prediction and its routing."""
  times = [
    LayerTimes(1.0, dense_s=2.0),
    LayerTimes(1.5, 0.1, 7.0),
    LayerTimes(1.0, dense_s=2.0),
    LayerTimes(1.6, 0.2, 8.0),
    LayerTimes(1.7, 0.3, 9.0),
  ]
  assert calibrate.prefetch_windows(times, (1, 3, 4)) == pytest.approx(
    [0.0, 7.0 + 1.0 + 2.0 + 1.6 + 0.2, 8.0 + 1.7 + 0.3]
  )


def test_a_tiny_model_is_calibrated():
  engine = EngineSpec(batch_size=2, context_tokens=64, kv_block_tokens=16)
  figures = calibrate.calibrate(tiny.tiny_spec(), ResidencySpec("lru", (3, 3)), engine)
  figures = json.loads(json.dumps(figures))
  assert figures["platform"] == "cpu"
  assert figures["position"] == 32
  assert [p["bytes"] >> 10 for p in figures["link_points"]] == [255, 511, 1023, 2047]
  dense, first, second = figures["layers"]
  assert dense["dense_s"] > 0 == dense["experts_s"] == dense["router_s"]
  assert first == second
  assert min(first["attention_s"], first["router_s"], first["experts_s"]) > 0
  assert len(figures["prefetch_window_s"]) == len(figures["link_experts"]) == 2
  transfer = figures["tau_s"] + 3 * 32 * 16 * 4 / figures["bandwidth_bytes_per_s"]
  assert figures["link_experts"] == [0, int(figures["prefetch_window_s"][1] / transfer)]
