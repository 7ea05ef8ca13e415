"""The demo model: 32 experts a layer in host memory, 12 of them on the device; one is copied ahead
of each layer's routing, and layers are staged whole for prompts. All of it is exact.

    moecore eval --config=configs/demo.py --workdir=/tmp/moecore-demo
    moecore generate --config=configs/demo.py:lod --domain=math --prompt="..."

Each request starts with the experts that its domain likes, by profiles that were recorded on other
text than the items; this makes them anew:

    python -m moecore_jax.training.workloads --output=/tmp/validation.jsonl
    moecore profile --config=configs/demo.py --prompts=/tmp/validation.jsonl --output=/tmp/demo.npz

Presets: none (MoE-CORE, load on demand, layer prefetch and all resident are compared), `moecore`,
  `lod`, `layer_prefetch`, `all_resident` (that system alone).
"""

from pathlib import Path

import moecore_jax
from moecore_jax.config import (
  SYSTEMS,
  EngineConfig,
  EvalConfig,
  PrefetchConfig,
  ResidencyConfig,
  RunConfig,
  StagingConfig,
)

PROFILES = Path(moecore_jax.__file__).parent / "assets" / "demo" / "profiles.npz"


def get_config(preset: str = "") -> RunConfig:
  """Returns the config of a preset, "" for the comparison of all systems."""
  config = RunConfig(
    residency=ResidencyConfig(
      policy="rhac",
      slots_per_layer=12,
      prefetch=PrefetchConfig(max_experts=1),
      profiles=str(PROFILES),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=2,
      context_tokens=256,
      prefill_buckets=(64,),
      kv_block_tokens=128,
      layer_loop="scanned",
    ),
    eval=EvalConfig(tasks=("math", "qa", "code", "agent"), systems=SYSTEMS),
  )
  if not preset:
    return config
  if preset not in SYSTEMS:
    raise ValueError(f"preset {preset!r} is unknown; choose one of {', '.join(SYSTEMS)}")
  config = config.for_system(preset)
  config.eval.systems = (preset,)
  return config
