"""Checkpoints: published safetensors folders, our Orbax folders, and loading either into memory."""

from moecore_jax.checkpoint.loading import Loaded, load

__all__ = ["Loaded", "load"]
