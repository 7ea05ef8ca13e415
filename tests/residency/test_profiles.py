"""Profiles: means against plain Python, orders, and the file's refusals."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.residency import profiles

NUM_EXPERTS = (4, 3)  # of two layers


def random_scores(rng, tokens):
  """Scores with masked experts, and garbage where the second layer has no expert."""
  scores = rng.normal(size=(tokens, 2, 4)).astype(np.float32)
  scores[rng.random(scores.shape) < 0.3] = -np.inf
  scores[:, :, 1] = rng.normal(size=(tokens, 2))  # each token has a finite score
  scores[:, 1, 3] = np.nan
  return scores


def plain_mean(scores, layer, expert):
  total = 0.0
  for token in scores:
    row = [float(x) for x in token[layer, : NUM_EXPERTS[layer]]]
    value = row[expert]
    total += value if value > -math.inf else min(x for x in row if x > -math.inf)
  return total / len(scores)


def profile_of(scores):
  gathered = profiles.ScoreSum(NUM_EXPERTS)
  gathered.add(scores)
  return gathered.profile()


def make_set(fingerprint="abc"):
  rng = np.random.default_rng(1)
  return profiles.ProfileSet(
    {"math": profile_of(random_scores(rng, 5)), "code": profile_of(random_scores(rng, 11))},
    fingerprint,
  )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_means_in_pieces_equal_plain_python(seed, cuts):
  scores = random_scores(np.random.default_rng(seed), 12)
  gathered = profiles.ScoreSum(NUM_EXPERTS)
  for piece in np.split(scores, sorted(cuts)):
    gathered.add(piece)
  profile = gathered.profile()
  assert profile.num_tokens == 12
  assert profile.mean_scores.dtype == np.float32
  for layer, experts in enumerate(NUM_EXPERTS):
    expected = [plain_mean(scores, layer, e) for e in range(experts)]
    np.testing.assert_allclose(profile.mean_scores[layer, :experts], expected, rtol=1e-6, atol=1e-7)
  assert np.isneginf(profile.mean_scores[1, 3])


def test_merging_equals_one_profile_of_all_tokens():
  rng = np.random.default_rng(2)
  parts = [random_scores(rng, n) for n in (1, 7, 30)]
  merged = profiles.merge(map(profile_of, parts))
  whole = profile_of(np.concatenate(parts))
  assert merged.num_tokens == whole.num_tokens == 38
  np.testing.assert_allclose(merged.mean_scores, whole.mean_scores, rtol=1e-5, atol=1e-6)


def test_warm_rank_puts_the_hottest_first_and_ties_by_index():
  mean = np.array([[0.5, 2.0, 0.5, -1.0], [3.0, 3.0, 4.0, -np.inf]], np.float32)
  rank = profiles.warm_rank(mean)
  assert rank.tolist() == [[1, 0, 2, 3], [1, 2, 0, 3]]
  assert rank.dtype == np.int32


@pytest.mark.parametrize(
  ("scores", "words"),
  [
    (np.zeros((2, 2, 3), np.float32), r"\[2, 2, 3\], expected \[tokens, 2 MoE layers, 4 experts\]"),
    (np.zeros((2, 4), np.float32), "expected"),
    (np.full((1, 2, 4), np.nan, np.float32), "NaN"),
    (np.full((1, 2, 4), np.inf, np.float32), "inf"),
    (np.full((1, 2, 4), -np.inf, np.float32), "without a finite score"),
  ],
)
def test_what_are_no_scores_is_refused(scores, words):
  with pytest.raises(ValueError, match=words):
    profiles.ScoreSum(NUM_EXPERTS).add(scores)


def test_no_tokens_no_profile():
  with pytest.raises(ValueError, match="at least one token"):
    profiles.ScoreSum(NUM_EXPERTS).profile()
  with pytest.raises(ValueError, match="at least one profile"):
    profiles.merge([])


def test_a_file_gives_back_what_was_saved(tmp_path):
  path = tmp_path / "profiles.npz"
  path.write_text("an older file")
  saved = make_set()
  saved.save(path)
  loaded = profiles.load(path, "abc", NUM_EXPERTS)
  assert [p.name for p in tmp_path.iterdir()] == ["profiles.npz"]
  assert loaded.domains == ("math", "code")
  assert loaded.fingerprint == "abc"
  for domain in (*loaded.domains, None):
    np.testing.assert_array_equal(
      loaded.lookup(domain).mean_scores, saved.lookup(domain).mean_scores
    )
    assert loaded.lookup(domain).num_tokens == saved.lookup(domain).num_tokens


def test_unknown_and_absent_domains_get_the_merged_profile():
  both = make_set()
  assert both.lookup("poetry") is both.lookup(None) is both.merged
  assert both.merged.num_tokens == 16
  assert both.lookup("math").num_tokens == 5


def rewrite(path, **changes):
  with np.load(path) as arrays:
    header, scores = json.loads(str(arrays["header"])), arrays["mean_scores"]
  scores = changes.pop("mean_scores", scores)
  np.savez(path, header=np.array(json.dumps(header | changes)), mean_scores=scores)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"version": 2}, "version is 2, expected 1"),
    ({"domains": ["math"]}, "do not agree"),
    ({"domains": ["math", "math"]}, "do not agree"),
    ({"domains": "ab"}, "do not agree"),
    ({"num_tokens": [1, 0]}, "do not agree"),
    ({"fingerprint": None}, "do not agree"),
    ({"mean_scores": np.full((2, 2, 4), np.nan, np.float32)}, "do not agree"),
    ({"mean_scores": np.zeros((2, 2, 4))}, "damaged"),
    ({"mean_scores": np.array([{}])}, "damaged"),  # a pickle
    ({"mean_scores": np.zeros((2, 2, 4), np.float32)}, r"the model has \[2, 4\]"),
    ({"fingerprint": "another"}, "other weights"),
  ],
)
def test_files_of_another_version_or_model_are_refused(tmp_path, changes, words):
  path = tmp_path / "profiles.npz"
  make_set().save(path)
  rewrite(path, **changes)
  with pytest.raises(ValueError, match=words) as e:
    profiles.load(path, "abc", NUM_EXPERTS)
  assert str(path) in str(e.value)
  assert "\n" not in str(e.value)


def test_missing_and_damaged_files_are_refused(tmp_path):
  path = tmp_path / "profiles.npz"
  with pytest.raises(ValueError, match="no such profile file"):
    profiles.load(path)
  make_set().save(path)
  whole = path.read_bytes()
  for content in (b"", whole[: len(whole) // 2], b"text"):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
      profiles.load(path)


def test_shapes_of_a_set_agree():
  other = profiles.Profile(np.zeros((1, 2), np.float32), 1)
  with pytest.raises(ValueError, match="expected one shape"):
    profiles.ProfileSet({"math": make_set().merged, "code": other}, "abc")
