"""Mixture-of-experts language models whose experts live in host memory behind a small device cache.

    import moecore_jax as moecore
    config = moecore.load_config("configs/demo.py")
    engine = moecore.Engine.from_checkpoint(None, config)
    for completion in engine.generate(["Tom has 3 apples ..."], max_new_tokens=64):
      print(completion.text)

Names are imported when first used, so that `from moecore_jax import residency` loads no model code.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from moecore_jax.config import RunConfig
  from moecore_jax.config_loading import load_config
  from moecore_jax.runtime.engine import Completion, Engine, Request, RequestMetrics

__version__ = "0.1.0"

__all__ = [
  "Completion",
  "Engine",
  "Request",
  "RequestMetrics",
  "RunConfig",
  "load_config",
]

_HOMES = {
  "RunConfig": "moecore_jax.config",
  "load_config": "moecore_jax.config_loading",
  "Completion": "moecore_jax.runtime.engine",
  "Engine": "moecore_jax.runtime.engine",
  "Request": "moecore_jax.runtime.engine",
  "RequestMetrics": "moecore_jax.runtime.engine",
}


def __getattr__(name: str) -> Any:
  """Imports a public name from its module on first use."""
  if name not in _HOMES:
    raise AttributeError(f"module 'moecore_jax' has no attribute {name!r}")
  return getattr(importlib.import_module(_HOMES[name]), name)
