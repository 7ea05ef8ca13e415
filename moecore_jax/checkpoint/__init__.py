"""Checkpoints: published safetensors folders, our Orbax folders, and loading either into memory."""

from moecore_jax.checkpoint.loading import Loaded, fingerprint, load
from moecore_jax.checkpoint.published import read_spec
from moecore_jax.checkpoint.store import known_fingerprint

__all__ = ["Loaded", "fingerprint", "known_fingerprint", "load", "read_spec"]
