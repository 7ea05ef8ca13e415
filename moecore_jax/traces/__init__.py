"""Routing traces: recorder, file, importers of other tools' formats, replays without a model."""

from moecore_jax.traces.engine_replay import replay_counters
from moecore_jax.traces.importers import load_any
from moecore_jax.traces.recorder import TraceRecorder
from moecore_jax.traces.regret import Comparison, compare
from moecore_jax.traces.replay import Counting, Replay, ReplayPolicy, hit_rates, replay
from moecore_jax.traces.trace import EventKind, Events, Phase, Trace
from moecore_jax.traces.trace_file import load, save

__all__ = [
  "Comparison",
  "Counting",
  "EventKind",
  "Events",
  "Phase",
  "Replay",
  "ReplayPolicy",
  "Trace",
  "TraceRecorder",
  "compare",
  "hit_rates",
  "load",
  "load_any",
  "replay",
  "replay_counters",
  "save",
]
