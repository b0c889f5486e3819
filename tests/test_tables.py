"""The figures that the pages show are those of the records, and whoever changes one of either is told."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

# Last: what is installed comes before the clone.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import plot, records, report, tables

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m benchmarks.tables --write"
NUMBER = r"\**(\d+\.\d+|\d+(\.\d+)? ?(%|x|us|ms|s|GB/s))\**"
MEASURED = re.compile(rf"{NUMBER}(( to | / |, | of ){NUMBER})*( (us|ms|s|GB/s))?")
"""What looks like a figure that was measured: with decimals, or with a unit."""


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == tables.filled(page.read_text()), f"run: {COMMAND}"


@pytest.mark.parametrize("backend", tables.PICTURES)
def test_a_picture_is_drawn_of_the_records(backend: str) -> None:
    assert plot.is_of(tables.PICTURES[backend], tables.drawn(backend)), f"run: {COMMAND}"


def test_every_table_is_shown_and_every_mark_has_its_end() -> None:
    pages = [page.read_text() for page in tables.PAGES]
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(tables.TABLES)
    for page in pages:
        assert re.findall(r"<!-- (table|end of table)", page) == ["table", "end of table"] * page.count("<!-- table")


@pytest.mark.parametrize("page", sorted({ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")}), ids=str)
def test_no_figure_stands_in_a_table_that_nobody_writes(page: Path) -> None:
    text = re.sub(r"<!-- table: .*?<!-- end of table -->", "", page.read_text(), flags=re.DOTALL)
    cells = [cell.strip() for row in re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE) for cell in row.split("|")]
    assert [cell for cell in cells if MEASURED.fullmatch(cell)] == [], "write it in benchmarks/tables.py"


@pytest.mark.parametrize("cell", ["1.07", "1.05 to 1.2", "**2.86**", "9.67 ms", "37 GB/s", "95 %", "4.84 / 1.23"])
def test_a_figure_is_known_as_one(cell: str) -> None:
    assert MEASURED.fullmatch(cell)


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_run_that_had_too_little_time_leaves_cells_and_no_table_out(name: str) -> None:
    measured = records.read(tables.RESULTS)
    whole = tables.TABLES[name](tables.Results(measured))
    brief = tables.TABLES[name](tables.Results([one for one in measured if one["case"] != "sizes"]))
    for new, old in zip(brief, whole, strict=True):
        assert all(cell in (known, "", tables.NOT_MEASURED) for cell, known in zip(new, old, strict=True))


NOTHING, NOT_MEASURED = [""] * 4, ["not measured"] * 4
BRIEF = {"loops": [NOT_MEASURED[:3]] * 8, "calls": [NOT_MEASURED, NOTHING, NOTHING, *[NOT_MEASURED, NOTHING] * 2]}
"""What stands in a table where nothing was measured, but for the heading and the words of each row."""


@pytest.mark.parametrize("name", BRIEF)
def test_a_size_that_was_not_measured_says_so_in_its_column_alone(name: str) -> None:
    measured = records.read(tables.RESULTS)
    heading, *whole = map(list, tables.TABLES[name](tables.Results(measured)))
    assert [row[1:] for row in tables.TABLES[name](tables.Results([]))[1:]] == BRIEF[name]
    for column, size in enumerate(heading[1:]):
        count, unit = size.split()
        nbytes = int(count) << {"KiB": 10, "MiB": 20}[unit]
        _, *brief = tables.TABLES[name](tables.Results([one for one in measured if one["nbytes"] != nbytes]))
        for new, old, cells in zip(brief, whole, BRIEF[name], strict=True):
            assert new == [*old[: column + 1], cells[column], *old[column + 2 :]]


def test_a_loader_that_was_not_measured_says_so_beside_those_that_were() -> None:
    measured = records.read(tables.RESULTS)
    whole = tables.loaders(tables.Results(measured))
    brief = tables.loaders(tables.Results([one for one in measured if one["nbytes"] != 64 << 20]))
    assert [[re.sub(r" / [\d.]+", " / not measured", cell) for cell in row] for row in whole[1:]] == brief[1:]
    assert brief[0] == whole[0]
    assert [row[1:] for row in tables.loaders(tables.Results([]))[1:]] == [["not measured / not measured"] * 2] * 5


def test_a_figure_that_is_changed_by_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "numbers.md"
    right = (ROOT / "docs" / "numbers.md").read_text()
    page.write_text(re.sub(r"^\| (CuPy: [^|]*\| )\d\.\d\d", r"| \g<1>0.12", right, count=1, flags=re.MULTILINE))
    assert page.read_text() != right
    monkeypatch.setattr(tables, "PAGES", (page,))
    assert tables.main([]) == 1
    assert tables.main(["--write"]) == 0
    assert page.read_text() == right


def test_a_picture_of_other_records_is_found() -> None:
    drawn = tables.drawn("cupy")
    picture = tables.PICTURES["cupy"]
    assert not plot.is_of(picture, drawn[1:])
    assert not plot.is_of(picture, [{**drawn[0], "of_limit": drawn[0]["of_limit"] + 0.01}, *drawn[1:]])


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_picture_suits_light_and_dark_pages_and_is_the_same_each_time(tmp_path: Path) -> None:
    drawn = tables.drawn("jax")
    pictures = [tmp_path / name for name in ("one.svg", "two.svg")]
    for picture in pictures:
        plot.draw(drawn, picture)
        assert plot.is_of(picture, drawn)
    assert pictures[0].read_text() == pictures[1].read_text()
    for light, dark in plot.DARK.items():
        assert f'[style*="fill: {light}"] {{fill: {dark} !important}}' in pictures[0].read_text()
        assert re.search(rf'style="[^"]*fill: {light}', pictures[0].read_text())


def compared(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--compare", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_two_files_of_records_are_compared_row_by_row(tmp_path: Path) -> None:
    old = records.read(tables.RESULTS)[:4]
    new = json.loads(json.dumps(old[1:]))
    new[0]["seconds"]["median"] *= 2
    new[0]["seconds"]["max"] *= 2
    new[1]["of_limit"] *= 0.5
    new[2]["seconds"].update({name: value * 1000 for name, value in new[2]["seconds"].items() if name != "n"})
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file, rows in zip(files, (old, new), strict=True):
        file.write_text(json.dumps(rows))
    shown = compared(*files).stdout
    found = re.findall(r"(\d+\.\d{3}) +\S +(\d\.\d{3}) +\S +(\w*)", shown)
    assert found == [("2.000", "1.000", ""), ("1.000", "0.500", ""), ("1000.000", "1.000", "slower")]
    assert "rows of one file alone: 1 of the old, 0 of the new" in shown
    assert "not the same" not in shown


@pytest.mark.parametrize(("factor", "said"), [(0.5, "faster"), (0.99, ""), (1.01, ""), (2.0, "slower")])
def test_what_lies_within_the_spread_is_neither_slower_nor_faster(tmp_path: Path, factor: float, said: str) -> None:
    old = records.read(tables.RESULTS)[:1]
    old[0]["seconds"].update({"min": 0.9, "median": 1.0, "max": 1.1})
    new = json.loads(json.dumps(old))
    new[0]["seconds"].update({name: factor * old[0]["seconds"][name] for name in ("min", "median", "max")})
    console = Console(record=True, width=200, file=io.StringIO())
    report.show_ratios(console, old, new)
    assert re.findall(rf"{factor:.3f} +\S +1\.000 +\S +(\w*)", console.export_text()) == [said]


def test_a_comparison_says_where_machine_or_versions_differ(tmp_path: Path) -> None:
    newer = records.read(tables.RESULTS)[:1]
    newer[0]["machine"]["gpu"] = "NVIDIA H200"
    newer[0]["versions"]["numpy"] = "3.1"
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    assert re.search(
        r"^not the same numpy: 2\.\d+\.\d+, then 3\.1$", compared(tables.RESULTS, tmp_path / "newer.json").stdout, re.MULTILINE
    )


@pytest.mark.parametrize("text", ["no JSON", "{}", "[1]", '[{"case": "link"}]'])
def test_a_file_that_holds_no_records_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    refused = compared(file, tables.RESULTS)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"--compare {file}: expected records, as --json writes them: " in refused.stderr
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "run.py"),
        "--backend",
        "host",
        "--quick",
        "--case",
        "link",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot run: {file}: expected records" in done.stderr
    assert file.read_text() == text
