"""Which experts are on the device: slot tables and replacement policies, pure array functions."""

from moecore_jax.residency.base import Policy
from moecore_jax.residency.policy import make_policy
from moecore_jax.residency.slots import (
  SlotTables,
  StepPlan,
  choose_slot,
  init_tables,
  place,
  plan_step,
  prefill_priority,
  protected,
  resident,
  touch,
)

__all__ = [
  "Policy",
  "SlotTables",
  "StepPlan",
  "choose_slot",
  "init_tables",
  "make_policy",
  "place",
  "plan_step",
  "prefill_priority",
  "protected",
  "resident",
  "touch",
]
