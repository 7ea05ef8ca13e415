"""Plain-text tables of an evaluation's figures."""

from collections.abc import Mapping, Sequence
from typing import Any


def render(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """Returns a table with aligned columns, numbers to the right.

  Args:
    headers: titles of the columns.
    rows: cells; a float is shown with three digits, None as a dash.
  """
  cells = [[_cell(value) for value in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
  numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(headers))]

  def line(row: Sequence[str]) -> str:
    parts = (
      text.rjust(width) if right else text.ljust(width)
      for text, width, right in zip(row, widths, numeric, strict=True)
    )
    return "  ".join(parts).rstrip()

  return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def evaluation(summary: Mapping[str, Any]) -> str:
  """Returns the tables of a batch evaluation: figures by task and system, then memory by region.

  Args:
    summary: the content of metrics.json.
  """
  headers = ["task", "system", "n", "accuracy", "TTFT ms", "TPOT ms"]
  headers += ["E2EL mean ms", "E2EL p50", "E2EL p95", "hit rate", "available", "misses/token"]
  headers += ["MB moved/token"]
  rows = summary["results"]
  if len({row["task"] for row in rows}) > 1:
    rows = [*rows, *summary["totals"]]
  figures = [_figures(row) for row in rows]
  return f"{render(headers, figures)}\n\n{memory(summary['memory_bytes'])}"


def by_layer(summary: Mapping[str, Any]) -> str:
  """Returns a table of decode by system and MoE layer, over all tasks.

  Args:
    summary: the content of metrics.json.
  """
  headers = ["system", "MoE layer", "hit rate", "available", "recall", "misses/token"]
  headers += ["prefetched/token", "useful/token", "wasted/token", "substituted/token"]
  headers += ["evicted/token", "MB moved/token"]
  names = ["hit_rate", "availability_frac", "recall_frac", "misses_per_token"]
  names += ["prefetches_per_token", "useful_prefetches_per_token", "wasted_prefetches_per_token"]
  names += ["substitutions_per_token", "evictions_per_token", "moved_mb_per_token"]
  rows = [
    [total["system"], layer, *(figures[name] for name in names)]
    for total in summary["totals"]
    for layer, figures in enumerate(total["layers"])
  ]
  return render(headers, rows)


def memory(memory_bytes: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
  """Returns a table of MB by region.

  Args:
    memory_bytes: bytes by system, by "device" or "host", by region.
  """
  regions = list(
    dict.fromkeys(
      (space, region)
      for spaces in memory_bytes.values()
      for space, sizes in spaces.items()
      for region in sizes
    )
  )
  headers = ["MB by region", *memory_bytes]
  rows = [
    [
      f"{space} {region}",
      *(system.get(space, {}).get(region, 0) / 1e6 for system in memory_bytes.values()),
    ]
    for space, region in regions
  ]
  for space in dict.fromkeys(space for space, _ in regions):
    sums = (sum(system.get(space, {}).values()) / 1e6 for system in memory_bytes.values())
    rows.append([f"{space} total", *sums])
  return render(headers, rows)


def _figures(row: Mapping[str, Any]) -> list[object]:
  latency = {name: row[name] or {} for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
  return [
    row["task"],
    row["system"],
    row["n"],
    row["accuracy"],
    latency["ttft_ms"].get("mean"),
    latency["tpot_ms"].get("mean"),
    *(latency["e2el_ms"].get(part) for part in ("mean", "p50", "p95")),
    row["hit_rate"],
    row["availability_frac"],
    row["misses_per_token"],
    row["moved_mb_per_token"],
  ]


def _cell(value: object) -> str:
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
  return str(value)
