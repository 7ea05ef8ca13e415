"""Every combination of policy, slots, batch and prefetch, with and without profiles.

Compiled with few optimisations, for time; test_exactness.py covers pairs of them as users compile.
"""

import functools
import itertools

import pytest

from moecore_jax.specs import PrefetchSpec
from tests.runtime import test_exactness as cover

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

run = functools.cache(cover.run.__wrapped__)  # not those that were compiled otherwise


@pytest.mark.parametrize("placement", ["in_flight", "slot"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slots", [(1, 2, 4), (3, 16, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("policy", cover.POLICIES)
def test_prefetch_full_product(policy, count, slots, batch, placement):
  """Each layer has each number of slots in turn, with profiles and without: one compilation."""
  engine = cover.engine_spec(batch, layer_loop="scanned")
  prefetch = PrefetchSpec(count, placement=placement)
  wanted = run(cover.DEEPER, "static", 16, engine)
  for turn, has_profiles in itertools.product(range(len(slots)), (False, True)):
    turned = slots[turn:] + slots[:turn]
    got = run(cover.DEEPER, policy, turned, engine, prefetch=prefetch, has_profiles=has_profiles)
    cover.assert_same(got, wanted)
