"""What each mechanism gives on the demo model: one change at a time, on one budget of 96 slots.

    moecore eval --config=configs/ablation.py --workdir=/tmp/ablation
    moecore eval --config=configs/ablation.py:substitution --workdir=/tmp/substitution

A few of them: `"--config.eval.systems=('moecore','lru','alpha_0.2')"`, quoted for the dots.

Presets: none (each mechanism replaced or switched off by itself, and other settings of prefetch and
  substitution), `substitution` (alpha of approximate substitution by slots, of 32 experts a layer).

The demo's layers are so alike that the allocation heuristic leaves their slots uniform.
`exact_slots` has those of the exact allocator, by a trace of other text than the items:

    python -m moecore_jax.training.workloads --output=/tmp/validation.jsonl
    moecore profile --config=configs/demo.py --prompts=/tmp/validation.jsonl \\
      --output=/tmp/demo.npz --trace=/tmp/trace.npz
    moecore allocate --config=configs/demo.py --trace=/tmp/trace.npz --allocator=exact
"""

import itertools
import runpy
from pathlib import Path
from typing import Any

from moecore_jax.config import RunConfig

_MECHANISMS: dict[str, dict[str, Any]] = {
  "lru": {"residency.policy": "lru"},
  "lfu": {"residency.policy": "lfu"},
  "exact_slots": {"residency.slots": (13, 11, 12, 12, 13, 14, 9, 12)},
  "no_profile": {"residency.profiles": ""},
  "no_prefetch": {"residency.prefetch.max_experts": 0},
  "prefetch_2": {"residency.prefetch.max_experts": 2},
  "prefetch_4": {"residency.prefetch.max_experts": 4},
  "renorm": {"residency.prefetch.predictor_input": "renorm"},
  "alpha_0.05": {"residency.substitution_threshold": 0.05},
  "alpha_0.1": {"residency.substitution_threshold": 0.1},
  "alpha_0.2": {"residency.substitution_threshold": 0.2},
  "no_staging": {"residency.staging.enabled": False},
}
_SUBSTITUTION: dict[str, dict[str, Any]] = {
  f"slots_{slots}_alpha_{alpha:g}": {
    "residency.slots": (slots,) * 8,
    "residency.substitution_threshold": alpha,
  }
  for slots, alpha in itertools.product((4, 8, 16), (0.0, 0.05, 0.1, 0.2))
}


def get_config(preset: str = "") -> RunConfig:
  """Returns the config of a preset, "" for one change of each mechanism."""
  if preset not in ("", "substitution"):
    raise ValueError(f"preset {preset!r} is unknown; choose substitution or none")
  config = runpy.run_path(str(Path(__file__).with_name("demo.py")))["get_config"]()
  config.eval.variants = _SUBSTITUTION if preset else {**_MECHANISMS}
  config.eval.systems = tuple(_SUBSTITUTION) if preset else ("moecore", *_MECHANISMS)
  return config
