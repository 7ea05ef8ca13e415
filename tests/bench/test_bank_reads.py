"""Which programs read the bank only for misses, and which do not, as compiled for each target."""

import pytest

from bench import bank_reads as br
from tests.bench import programs


def _reads(compiled, name):
  module = compiled.module(name)
  return module, br.bank_reads(module)


@pytest.mark.parametrize(
  ("name", "loops"), [("layer_by_layer", ("counted",)), ("scanned", (3, "counted"))]
)
def test_loads_of_misses_are_one_row_slices_in_counted_loops(compiled, name, loops):
  module, reads = _reads(compiled, name)
  assert len(reads) == (programs.LAYERS if name == "layer_by_layer" else 1)
  assert all(read.is_one_row_in_counted_loop and read.loops == loops for read in reads)
  assert {read.bank for read in reads} == {"args[0]"}
  assert {read.shape for read in reads} == {f"u32[1,{programs.WIDTH},{programs.WIDTH // 2}]"}
  if compiled.target != "cpu":
    assert all(read.is_async for read in reads)
  assert br.host_compute_ops(module) == 0
  assert br.prefetch_overlap(module, reads) is None


@pytest.mark.parametrize(
  ("name", "rows", "loops"),
  [
    ("reads_every_turn", 1, (programs.PER_TOKEN,)),
    ("reads_two_rows", 2, ("counted",)),
    ("loads_until", 1, ("open",)),
  ],
)
def test_slices_that_move_more_than_the_misses_are_told_apart(compiled, name, rows, loops):
  _, reads = _reads(compiled, name)
  assert reads
  for read in reads:
    assert (read.opcode, read.rows, read.loops) == ("dynamic-slice", rows, loops)
    assert read.is_several_rows == (rows > 1)
    assert not read.is_one_row_in_counted_loop


def test_a_read_of_the_whole_bank_is_found(compiled):
  _, reads = _reads(compiled, "copies_the_bank")
  assert [read.rows for read in reads] == [0]
  assert not reads[0].is_one_row_in_counted_loop


def test_arithmetic_on_a_host_array_is_found(compiled):
  module, reads = _reads(compiled, "computes_on_the_host")
  assert not any(read.is_one_row_in_counted_loop for read in reads)
  if compiled.target != "cpu":  # the CPU's program knows one memory only
    assert br.host_compute_ops(module) > 0


def test_prefetch_overlap(compiled):
  """Compute lies between start and done; not so where the experts need what arrives, and not on the
  CPU, which just copies."""
  module, reads = _reads(compiled, "prefetch")
  assert br.prefetch_overlap(module, reads) is (compiled.target != "cpu")
  hidden_by = "nothing" if compiled.target == "cpu" else br.HIDDEN
  assert br.prefetch_hidden_by(module, reads) == {hidden_by: 1}
  assert br.staging_overlap(module, reads) is None
  module, reads = _reads(compiled, "late_prefetch")
  assert br.prefetch_overlap(module, reads) is False


def test_pool_is_updated_in_place(compiled):
  pool_bytes = programs.LAYERS * programs.SLOTS * programs.WIDTH * programs.WIDTH * 2
  for name in ("layer_by_layer", "scanned", "prefetch"):
    sizes = compiled.sizes(name)
    assert sizes["alias_bytes"] >= pool_bytes
    assert (
      sizes["host_argument_bytes"]
      == programs.LAYERS * programs.EXPERTS * programs.WIDTH * programs.WIDTH * 2
    )
    assert sizes["argument_bytes"] < 2 * pool_bytes
