"""Plain-Python replacement policies and cache, written from their definitions.

They share no code with the package. Arithmetic is float32, as in the signals of the package; the
policies' definitions stand in the docstrings of `moecore_jax.residency`.
"""

import math

import numpy as np

F32 = np.float32


def weighted(values, weight):
  """weight * min-max over all experts; masked ones count as the smallest finite value."""
  finite = [v for v in values if math.isfinite(v)]
  if not finite or min(finite) == max(finite):
    return [F32(0)] * len(values)
  low, high = F32(min(finite)), F32(max(finite))
  scale = F32(weight) / (high - low)
  return [(F32(v if math.isfinite(v) else low) - low) * scale for v in values]


class Rhac:
  """Signals of one layer, kept as the whole history of selected sets."""

  def __init__(self, num_experts, spec):
    self.num_experts = num_experts
    self.spec = spec
    self.history = []
    self.average = [F32(0)] * num_experts
    self.age = [0] * num_experts
    self.score = [F32(0)] * num_experts

  def observe(self, tokens):
    for selected, _ in tokens:
      self.history.append(set(selected))
      for e in range(self.num_experts):
        was_selected = e in selected
        kept = F32(self.spec.decay) * self.average[e]
        self.average[e] = kept + F32(1 - self.spec.decay) * F32(was_selected)
        self.age[e] = 0 if was_selected else self.age[e] + 1
        if self.spec.age_cap:
          self.age[e] = min(self.age[e], self.spec.age_cap)
    if tokens:
      self.score = [max(F32(scores[e]) for _, scores in tokens) for e in range(self.num_experts)]

  def placed(self, expert):
    pass

  @property
  def frequency(self):
    recent = self.history[-self.spec.window :]
    return [sum(e in selected for selected in recent) for e in range(self.num_experts)]

  def priority(self):
    frequency = weighted(self.frequency, self.spec.frequency_weight)
    average = weighted(self.average, self.spec.average_weight)
    score = weighted(self.score, self.spec.score_weight)
    age = weighted(self.age, self.spec.age_weight)
    return [f + m + q - a for f, m, q, a in zip(frequency, average, score, age, strict=True)]


class Lru:
  def __init__(self, num_experts):
    self.time = 0
    self.last_use = [0] * num_experts

  def observe(self, tokens):
    for selected, _ in tokens:
      for e in selected:
        self.placed(e)

  def placed(self, expert):
    self.time += 1
    self.last_use[expert] = self.time

  def priority(self):
    return self.last_use


class Lfu:
  def __init__(self, num_experts):
    self.count = [0] * num_experts

  def observe(self, tokens):
    for selected, _ in tokens:
      for e in selected:
        self.count[e] += 1

  def placed(self, expert):
    self.count[expert] = 1

  def priority(self):
    return self.count


class Fifo:
  def __init__(self, num_experts):
    self.time = 0
    self.entry = [0] * num_experts

  def observe(self, tokens):
    pass

  def placed(self, expert):
    self.time += 1
    self.entry[expert] = self.time

  def priority(self):
    return self.entry


class Cache:
  """One layer's slots under a policy; `policy` None never evicts.

  Attributes:
    slots: expert in each slot, or None.
    log: (expert, slot, victim) of each execution that was not a hit; slot None is a transient row.
  """

  def __init__(self, num_slots, warm_rank, policy):
    self.slots = [None] * num_slots
    self.warm_rank = warm_rank
    self.policy = policy
    self.log = []

  def step(self, tokens):
    """Runs the (selected experts, scores) of one step's real tokens."""
    if self.policy:
      self.policy.observe(tokens)
    union = []
    for selected, _ in tokens:
      union += [e for e in selected if e not in union]
    hits = [e for e in union if e in self.slots]
    misses = [e for e in union if e not in self.slots]
    self.log = []
    if self.policy is None:
      for e in misses:
        self._load(e, kept=set(range(len(self.warm_rank))))
      return
    waiting = hits + misses
    # More experts than slots: the first ones run one after the other until the rest fits.
    while len(waiting) > len(self.slots):
      if waiting[0] not in self.slots:
        self._load(waiting[0], kept=set(waiting))
      waiting.pop(0)
    for e in waiting:
      if e not in self.slots:
        self._load(e, kept=set(waiting))

  def _load(self, expert, kept):
    if None in self.slots:
      slot = self.slots.index(None)
    else:
      leaving = [s for s, e in enumerate(self.slots) if e not in kept]
      if not leaving:
        self.log.append((expert, None, None))
        return
      priority = self.policy.priority()
      slot = min(
        leaving, key=lambda s: (priority[self.slots[s]], -self.warm_rank[self.slots[s]], s)
      )
    self.log.append((expert, slot, self.slots[slot]))
    self.slots[slot] = expert
    if self.policy:
      self.policy.placed(expert)
