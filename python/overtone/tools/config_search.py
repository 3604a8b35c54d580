"""Derives the table of triton_kernels/attention/config.py, by compiling candidates; no GPU is needed.

    python -m overtone.tools.config_search --write                        the whole table
    python -m overtone.tools.config_search --write sm_90 --dtype tf32     only these cells of it
    python -m overtone.tools.config_search sm_90 --kernel projection      prints cells and writes nothing

A candidate must load 16 bytes per thread at a time, and compile without a spill and within the limits in every call in
which its kernel is launched with it (triton_aot.attention_calls). Of those the one is taken whose launches take least
time by attention_cost.time, at the occupancy that its registers and shared memory allow; of equals, the first of the
lists below.

What compilation said of every candidate is cached in build/config_search.csv, so that an interrupted search resumes:
after a change of the kernels, delete their lines.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from triton.errors import TritonError

from overtone.tools import attention_cost as model
from overtone.tools import occupancy
from overtone.tools import triton_aot as aot
from overtone.triton_kernels.attention import config as configs
from overtone.triton_kernels.runtime import Launch, LaunchConfig, assume_architecture, record_launches

TILES: dict[str, list[tuple[int, ...]]] = {
    "attention": [(128, 64), (128, 32), (64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16)],
    "attention_single_pass": [(64, 256), (32, 256), (16, 256)],
    "fused": [(64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32)],
    "fused_single_pass": [(64, 256), (32, 256)],
    "projection": [(128, 64, 64), (128, 64, 32), (64, 64, 64), (64, 64, 32), (64, 32, 32), (32, 32, 32)],
    "dout": [(128, 64), (128, 32), (64, 64), (64, 32), (32, 32), (32, 16)],
    "dweight": [(64, 64, 64), (64, 64, 32), (64, 32, 32), (32, 32, 32)],
    "dkv": [(64, 128), (32, 128), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16)],
    "dkv_split": [(32, 32), (16, 32), (16, 16)],
    "dq": [(128, 64), (128, 32), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16)],
}
# float32 without matrix instructions: every thread holds rows and columns of its operands.
FLOAT_TILES: dict[str, list[tuple[int, ...]]] = {
    "attention": [(32, 32), (32, 16), (16, 16)],
    "projection": [(64, 64, 32), (64, 32, 32), (32, 32, 32)],
    "dout": [(32, 32), (32, 16), (16, 16)],
    "dweight": [(64, 64, 32), (64, 32, 32), (32, 32, 32)],
    "dkv": [(32, 32), (16, 32), (16, 16)],
    "dkv_split": [(32, 32), (16, 32), (16, 16)],
    "dq": [(32, 32), (32, 16), (16, 16)],
}
WARPS = (8, 4)
STAGES = {"half": (3, 2, 1), "tf32": (3, 2, 1), "float": (2, 1)}
# The tiles that a kernel loads in its loop or before it, by the constants of their sides.
OPERANDS = {
    "projection": (("BM", "BK"), ("BK", "E_TILE")),
    "dout": (("BM", "BK"), ("BD", "BK")),
    "dweight": (("BK", "BM"), ("BK", "BE")),
}
VECTOR = 16  # bytes
NOT_MODELED = {"IS_CAUSAL": False, "MAKE_DELTA": False}
RECORD = Path(__file__).resolve().parents[3] / "build" / "config_search.csv"
# LaunchConfig for the launches of a call that are not looked at.
ANY = {name: LaunchConfig(dict.fromkeys(names, 32), 4) for name, names in configs.TILES.items()}


class Row(NamedTuple):
    """Of the table: kind of products, width of a head, mask, kernel."""

    kind: str
    width: str
    mask: str
    kernel: str

    def calls(self, architecture: str) -> list[aot.AttentionCall]:
        """In which the kernel is launched with the row's configuration, those of many tokens first."""
        dtype = torch.bfloat16 if self.kind == "half" else torch.float32
        precision = "tf32" if self.kind == "tf32" else "ieee"
        found = [
            call
            for call in aot.attention_calls(dtype, architecture)
            if call.precision == precision
            and self.width in ("any", "64" if call.width <= 64 else "128")
            and self.mask in ("any", "masked" if call.mask else "plain")
        ]
        return sorted(found, key=lambda call: (call.mask != "bias", not call.is_causal, -call.tokens))

    def launches(self, architecture: str, config: LaunchConfig) -> list[list[Launch]]:
        """Of the kernel with this configuration, by what is compiled: the one that is timed, then with other sizes."""
        trial = {
            name: ANY[name] for name in ANY if "fused" not in name and "single_pass" not in name and "split" not in name
        }
        if self.kernel == "fused_single_pass":
            trial["fused"] = ANY["fused"]
        trial[self.kernel] = config
        name = self.kernel.removesuffix("_single_pass").replace("dkv_split", "dkv")
        found: dict[tuple, list[Launch]] = {}
        with assume_architecture(architecture), mock.patch.object(configs, "table", _table_of(trial)):
            for call in self.calls(architecture):
                with record_launches() as launches:
                    call()
                for launch in launches:
                    is_single_pass = bool(launch.meta.get("SINGLE_PASS"))
                    if launch.kernel.fn.__name__ == f"{name}_kernel" and is_single_pass == self.kernel.endswith(
                        "_single_pass"
                    ):
                        found.setdefault(aot.variant(launch), []).append(launch)
        return list(found.values())

    def loads_vectors(self, config: LaunchConfig, warp_size: int) -> bool:
        """Whether a tile has VECTOR bytes for every thread."""
        sides = config.tile | {"BD": 0 if self.width == "any" else int(self.width)}
        operands = OPERANDS.get(self.kernel, (("BM", "BD"), ("BN", "BD")))
        size = max(sides[rows] * sides[columns] for rows, columns in operands) * (2 if self.kind == "half" else 4)
        return size >= VECTOR * warp_size * config.num_warps


def _table_of(config: dict[str, LaunchConfig]):
    """Stands in for configs.table."""

    def table(architecture, dtype, precision, width, masked):
        return configs.ConfigTable(configs.padded_width(width), config)

    return table


def rows() -> Iterator[Row]:
    """In half precision a mask's tile decides what fits, so masks have rows of their own; float32 has one for both."""
    for kind in ("half", "tf32", "float"):
        yield Row(kind, "any", "any", "projection")
        yield Row(kind, "any", "any", "dweight")
        for width in ("64", "128"):
            yield Row(kind, width, "any", "dout")
            for mask in ("plain", "masked") if kind == "half" else ("any",):
                yield Row(kind, width, mask, "attention")
                if kind == "half" and mask == "plain":
                    yield Row(kind, width, mask, "attention_single_pass")
                if kind != "float" and width == "64":
                    yield Row(kind, width, mask, "fused")
                if kind == "half" and mask == "plain" and width == "64":
                    yield Row(kind, width, mask, "fused_single_pass")
                for kernel in ("dkv", "dkv_split", "dq"):
                    yield Row(kind, width, mask, kernel)


def every_config(row: Row, column: str) -> Iterator[LaunchConfig]:
    names, tiles = configs.TILES[row.kernel], (FLOAT_TILES if row.kind == "float" else TILES)[row.kernel]
    warp_size = occupancy.ARCHITECTURES[column].target.warp_size
    stages = (1,) if row.kernel.endswith("_single_pass") else STAGES[row.kind]
    for tile, num_warps, num_stages in itertools.product(tiles, WARPS, stages):
        config = LaunchConfig(dict(zip(names, tile, strict=True)), num_warps, num_stages)
        if row.loads_vectors(config, warp_size):
            yield config


def candidates(row: Row, column: str) -> Iterator[tuple[LaunchConfig, list[list[Launch]]]]:
    """LaunchConfig, and the launches with them."""
    for _, same_tile in itertools.groupby(every_config(row, column), key=lambda config: config.tile):
        first, *rest = same_tile
        launches = row.launches(column, first)
        for config in (first, *rest):
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            yield config, [[x._replace(meta=x.meta | options) for x in same] for same in launches]


class Record:
    """What compilation said of candidates: their resident warps, launch by launch, or why they do not fit."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.verdicts: dict[tuple[str, ...], str] = {}
        if file is not None and file.exists():
            with file.open(newline="") as lines:
                self.verdicts = {tuple(line[:-1]): line[-1] for line in csv.reader(lines)}

    def verdict(self, search: Search, config: LaunchConfig, launches: list[list[Launch]], best_time: float) -> str:
        key = (*search.row, search.column, as_cell(config))
        if key not in self.verdicts:
            self.verdicts[key] = search.compile(config, launches, best_time)
            if self.file is not None:
                self.file.parent.mkdir(exist_ok=True)
                with self.file.open("a") as lines:
                    lines.write(",".join((*key, self.verdicts[key])) + "\n")
        return self.verdicts[key]


class Search:
    """The fastest configuration of a row, by the model, among those that fit every architecture of the column."""

    def __init__(self, row: Row, column: str, record: Record) -> None:
        self.row, self.column, self.record = row, column, record
        self.gpu = next(gpu for gpu in model.GPUS.values() if gpu.architecture == column)
        names = sorted(occupancy.ARCHITECTURES, key=lambda name: name != column)
        self.architectures = [
            occupancy.ARCHITECTURES[name] for name in names if configs.config_arch(name) == column and row.calls(name)
        ]
        self.shared = min(architecture.shared_per_block for architecture in self.architectures)
        self.spilled: list[LaunchConfig] = []

    def fastest(self) -> LaunchConfig | None:
        """At full occupancy a candidate's time is a lower bound: those whose bound is no better are not compiled."""
        launches = list(candidates(self.row, self.column))
        full = self.architectures[0].warps_per_processor
        bounds = [self._time(asked, [full] * len(asked)) for _, asked in launches]
        best, best_time = None, float("inf")
        for bound, (config, asked) in sorted(zip(bounds, launches, strict=True), key=lambda pair: pair[0]):
            if bound >= best_time:
                break
            if any(_is_harder(config, other) for other in self.spilled):
                continue
            verdict = self.record.verdict(self, config, asked, best_time)
            if verdict == "spills":
                self.spilled.append(config)
            if verdict[0].isdigit() and self._time(asked, _numbers(verdict)) < best_time:
                best, best_time = config, self._time(asked, _numbers(verdict))
        return best

    def _time(self, launches: list[list[Launch]], warps: list[int]) -> float:
        """At what is modeled: a causal mask skips about half of any tiles, and δ takes a loop more of any."""
        full = (first._replace(meta=first.meta | NOT_MODELED) for first, *_ in launches)
        return sum(model.time(launch, self.gpu, resident) for launch, resident in zip(full, warps, strict=True))

    def compile(self, config: LaunchConfig, launches: list[list[Launch]], best_time: float) -> str:
        """Resident warps of every launch on the column's own architecture, or why one does not fit.

        What is no better there than the best so far is not tried on the column's other architectures, nor in float16:
        AMD's compiler may need more registers for that than for bfloat16.
        """
        own, *others = self.architectures
        warps = []
        try:
            for first, *same in map(_one_of_each, launches):
                warps.append(self._resident_warps(first, own))
                for launch in same:
                    self._resident_warps(launch, own)
            if self._time(launches, warps) < best_time:
                every = list(itertools.chain(*map(_one_of_each, launches)))
                pairs = [*itertools.product(others, every)]
                if self.row.kind == "half":
                    pairs += itertools.product(self.architectures, map(_in_float16, every))
                for architecture, launch in pairs:
                    self._resident_warps(launch, architecture)
        except DoesNotFitError as error:
            return str(error)
        except (TritonError, RuntimeError) as error:  # RuntimeError: of the compiler's passes
            print(f"{config} does not compile: {str(error).splitlines()[0]}", file=sys.stderr)
            return "does not compile"
        return " ".join(map(str, warps))

    def _resident_warps(self, launch: Launch, architecture: occupancy.Architecture) -> int:
        usage = aot.compile(aot.Kernel(self.row.kernel, "", launch.args[0].dtype, launch), architecture)
        if usage.spills:
            # With registers left the compiler spilled for more resident warps, which says nothing of larger tiles.
            is_full = usage.registers >= architecture.registers_per_thread
            raise DoesNotFitError("spills" if is_full else "spills with registers left")
        if usage.violation(architecture) is not None or usage.shared > self.shared:  # it is about the same on all
            raise DoesNotFitError("exceeds a limit")
        return round(usage.occupancy * architecture.warps_per_processor)


class DoesNotFitError(Exception):
    """LaunchConfig spill or exceed a limit."""


def _numbers(verdict: str) -> list[int]:
    return [int(warps) for warps in verdict.split()]


def _one_of_each(launches: list[Launch]) -> list[Launch]:
    """The first with a number of tokens that 16 divides, and the first without: they are compiled to different code."""
    found: dict[bool, Launch] = {}
    for launch in launches:
        values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        found.setdefault(int(values["n_queries" if "n_queries" in values else "n_tokens"]) % 16 == 0, launch)
    return list(found.values())


def _in_float16(launch: Launch) -> Launch:
    """The same of bfloat16."""
    is_half = [torch.is_tensor(arg) and arg.dtype == torch.bfloat16 for arg in launch.args]
    args = [arg.half() if half else arg for arg, half in zip(launch.args, is_half, strict=True)]
    return launch._replace(args=tuple(args))


def _is_harder(config: LaunchConfig, other: LaunchConfig) -> bool:
    """Than one which spills: no smaller in any side, no fewer loads under way, and not held by more warps."""
    sides = zip(config.tile.values(), other.tile.values(), strict=True)
    eases = config.num_warps > other.num_warps or config.num_stages < other.num_stages
    return not eases and all(size >= than for size, than in sides)


def as_cell(config: LaunchConfig | None) -> str:
    """As in the table."""
    return "-" if config is None else ".".join(map(str, (*config.tile.values(), config.num_warps, config.num_stages)))


def cell(row: Row, architecture: str, column: dict[Row, str], record: Record) -> str:
    if row.kind == "tf32" and architecture.startswith("gfx"):
        return "-"  # AMD's Triton has no TF32
    together = column.get(row._replace(kernel="dkv"), "-")
    if row.kernel == "dkv_split" and together != "-":
        return "-"
    return as_cell(Search(row, architecture, record).fastest())


def derive(architectures: Iterable[str], wanted: list[Row], record: Record) -> dict[tuple[str, Row], str]:
    """(column, row) -> cell."""
    cells = {}
    for architecture in architectures:
        column = {row: cell for (name, row), cell in shipped(configs._TABLE).items() if name == architecture}
        for row in wanted:
            cells[architecture, row] = column[row] = cell(row, architecture, column, record)
            print(architecture, *row, column[row], file=sys.stderr, flush=True)
    return cells


def shipped(table: str) -> dict[tuple[str, Row], str]:
    """(column, row) -> cell."""
    _, *lines = (line.split() for line in table.strip().splitlines())
    return {
        (name, Row(*line[:4])): cell for line in lines for name, cell in zip(configs.COLUMNS, line[4:], strict=True)
    }


def as_text(cells: dict[tuple[str, Row], str]) -> str:
    columns, wanted = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    header = ("dtype", *Row._fields[1:], *columns)
    lines = [header, *((*row, *(cells[column, row] for column in columns)) for row in wanted)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        " ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", nargs="*", help=", ".join(configs.COLUMNS))
    parser.add_argument("--kernel", action="append", choices=configs.TILES, help="only this one (repeatable)")
    parser.add_argument("--dtype", action="append", choices=STAGES, help="only this kind of products (repeatable)")
    parser.add_argument("--write", action="store_true", help="write the cells into the table, and keep a record")
    args = parser.parse_args()
    wanted = [row for row in rows() if row.kernel in (args.kernel or TILES) and row.kind in (args.dtype or STAGES)]
    cells = derive(args.architecture or configs.COLUMNS, wanted, Record(RECORD if args.write else None))
    print(as_text(cells), end="")
    if args.write:
        file = Path(configs.__file__)
        before, table, after = re.split(r'(?s)(?<=_TABLE = """\n)(.*?)(?=""")', file.read_text())
        file.write_text(before + as_text(shipped(table) | cells) + after)


if __name__ == "__main__":
    main()
