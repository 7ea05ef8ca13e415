"""The reader of compiled programs, on programs whose loops and tuples are known."""

import pytest

from bench import hlo

_TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={LAYOUT}

%add_one (p.1: s32[]) -> s32[] {
  %p.1 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %sum = s32[] add(%p.1, %one)
}

%body (t.1: (s32[], /*index=1*/s32[], u32[8,4])) -> (s32[], s32[], u32[8,4]) {
  %t.1 = (s32[], s32[], /*index=2*/u32[8,4]{1,0:S(5)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n.1 = s32[] get-tuple-element(%t.1), index=1
  %bank.1 = u32[8,4]{1,0:S(5)} get-tuple-element(%t.1), index=2
  %next = s32[] fusion(%i.1), kind=kLoop, calls=%add_one
  ROOT %out = (s32[], s32[], u32[8,4]{1,0:S(5)}) tuple(%next, %n.1, /*index=2*/%bank.1)
}

%condition (t.2: (s32[], s32[], u32[8,4])) -> pred[] {
  %t.2 = (s32[], s32[], u32[8,4]{1,0:S(5)}) parameter(0)
  %i.2 = s32[] get-tuple-element(%t.2), index=0
  %n.2 = s32[] get-tuple-element(%t.2), index=1
  ROOT %less = pred[] compare(%i.2, %n.2), direction=LT
}

ENTRY %main (n: s32[], bank: u32[8,4]) -> s32[] {
  %n = s32[]{:T(128)} parameter(0)
  %bank = u32[8,4]{1,0:T(8,128)S(5)} parameter(1), metadata={op_name="bank[\\'gate\\']"}
  %zero = s32[] constant(0)
  %start = (s32[], s32[], u32[8,4]{1,0:S(5)}) tuple(%zero, BOUND, %bank)
  %loop = (s32[], s32[], u32[8,4]{1,0:S(5)}) while(%start), condition=%condition, body=%body
  ROOT %result = s32[] get-tuple-element(%loop), index=0
}
"""


def _parse(bound: str = "%n", text: str = _TEXT) -> tuple[hlo.Module, hlo.Frame]:
  layout = "(s32[]{:T(128)}, u32[8,4]{1,0:T(8,128)S(5)})->s32[]"
  module = hlo.parse(text.replace("BOUND", bound).replace("LAYOUT", layout))
  return module, hlo.Frame(module.computations[module.entry])


def test_parse_reads_shapes_operands_and_roots():
  module, entry = _parse()
  assert module.entry == "main"
  assert module.entry_shapes == ("s32[]{:T(128)}", "u32[8,4]{1,0:T(8,128)S(5)}")
  assert entry["start"].operands == ("zero", "n", "bank")
  assert entry["bank"].op_name == "bank['gate']"
  assert entry["loop"].computation("body") == "body"
  assert entry["loop"].called == ("condition", "body")
  assert list(module.computations["body"].instructions) == [
    "t.1",
    "i.1",
    "n.1",
    "bank.1",
    "next",
    "out",
  ]
  assert module.computations["body"].root == "out"


def test_parse_refuses_a_program_that_is_not_compiled():
  with pytest.raises(ValueError, match="compiled, scheduled module"):
    hlo.parse("HloModule jit_f, entry_computation_layout={()->s32[]}\n")


def test_resolve_passes_unchanged_loop_elements():
  module, entry = _parse()
  body = hlo.enter(module, entry, entry["loop"], "body")
  frame, instruction, _ = hlo.resolve(module, body, "bank.1")
  assert (frame.computation.name, instruction.name) == ("main", "bank")
  frame, instruction, path = hlo.resolve(module, body, "i.1")
  assert (frame.computation.name, instruction.opcode, path) == ("body", "parameter", (0,))


def test_loop_trips():
  module, entry = _parse()
  assert hlo.loop_trips(module, entry, entry["loop"]) == "counted"
  module, entry = _parse(
    "%five", _TEXT.replace("  %zero = ", "  %five = s32[] constant(5)\n  %zero = ")
  )
  assert hlo.loop_trips(module, entry, entry["loop"]) == 5
  module, entry = _parse(
    "%n", _TEXT.replace("%one = s32[] constant(1)", "%one = s32[] constant(0)")
  )
  assert hlo.loop_trips(module, entry, entry["loop"]) == "open", "a counter that does not count"
  module, entry = _parse("%n", _TEXT.replace("tuple(%next, %n.1", "tuple(%next, %next"))
  assert hlo.loop_trips(module, entry, entry["loop"]) == "open", "a bound that moves with the loop"


def test_loops_of_compiled_programs(compiled):
  """The layer scan turns three times, the expert loop three times, the loop over misses as often as
  it must."""
  module = compiled.module("scanned")
  frame = hlo.Frame(module.computations[module.entry])
  found = []
  frames = [frame]
  while frames:
    frame = frames.pop()
    for instruction in frame.computation.instructions.values():
      if instruction.opcode == "while":
        found.append((len(frame.loops), hlo.loop_trips(module, frame, instruction)))
        frames.append(hlo.enter(module, frame, instruction, instruction.computation("body")))
      elif instruction.opcode == "call":
        frames.append(hlo.enter(module, frame, instruction, instruction.called[0]))
  assert (0, 3) in found and (1, 3) in found and (1, "counted") in found
