"""Checkpoints: published safetensors folders, our Orbax folders, and loading either into memory."""

from moecore_jax.checkpoint.loading import Loaded, load
from moecore_jax.checkpoint.published import read_spec

__all__ = ["Loaded", "load", "read_spec"]
