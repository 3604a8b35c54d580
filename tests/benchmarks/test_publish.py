"""Published figures are made of docs/benchmarks.json, and nothing else; runs that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overtone.benchmarks.harness import publish, tables
from overtone.benchmarks.harness.report import FORMAT
from overtone.benchmarks.harness.tables import FASTEST, Figures, Row
from overtone.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "benchmarks.json"

MACHINE = {
    "cpu": "A CPU",
    "cpus": 2,
    "isa": "avx512",
    "threads": 2,
    "onednn_max_cpu_isa": None,
    "versions": {"torch": "2.13.0"},
    "commit": "0123456789abcdef",
    "system": "the name of a machine",
}
NAME = "qr 12x768 float32 forward"


def result(name: str = NAME, ratio: float = 2.0, **fields) -> dict:
    given = {
        "name": name,
        "trusted": True,
        "undisturbed_rounds": 10,
        "seconds": {"ours": {"median": 0.001}, "torch.linalg": {"median": ratio * 0.001}},
        "ratios": {"torch.linalg": ratio},
        "baselines": ["torch.linalg"],
        "memory": {"ours": 1_000_000, "torch.linalg": 2_500_000},
        "checks": {"ours": {"passed": True, "message": ""}, "torch.linalg": {"passed": True, "message": ""}},
    }
    return {**given, **fields}


def run(*results: dict, **fields) -> dict:
    return {"format": FORMAT, "quick": False, "machine": MACHINE, "results": list(results), **fields}


def table(*rows: Row) -> Figures:
    return Figures("times", ("12x768", "64x65 softmax"), rows)


def cells(row: Row, *results: dict) -> list[str]:
    summary = publish.summarize([run(*results)])
    return [cell.strip() for cell in table(row).markdown(summary["results"]).splitlines()[2].strip("|").split("|")[1:]]


QR = "qr {} float32 forward"


# The repository.


def test_the_pages_are_what_the_committed_figures_give():
    summary = json.loads(COMMITTED.read_text())
    for name, text in publish.pages(summary, ROOT).items():
        assert (ROOT / name).read_text() == text, f"{name}: run overtone bench --publish FILE…"
    assert COMMITTED.read_text() == publish.as_text(summary)


def test_the_committed_figures_are_small_and_name_no_machine():
    summary = json.loads(COMMITTED.read_text())
    assert len(COMMITTED.read_text()) < 60_000
    assert set(summary["machine"]) == set(publish.MACHINE) and set(summary["results"]) <= tables.standard_names()
    assert all("ours" in each["checks"]["passed"] for each in summary["results"].values() if each["ratios"])


def test_a_changed_figure_is_seen():
    summary = json.loads(COMMITTED.read_text())
    for each in summary["results"].values():
        each["ratios"] = {name: 1.25 * ratio for name, ratio in each["ratios"].items()}
        each["trusted"] = True
    for name, text in publish.pages(summary, ROOT).items():
        assert (ROOT / name).read_text() != text


# Cells.


def test_losses_are_bold_disturbed_and_missing_cases_are_a_dash():
    row = Row("× torch", QR, "torch.linalg")
    assert cells(row, result(ratio=2.345)) == ["2.35", "–"]
    assert cells(row, result(ratio=23.45)) == ["23", "–"]
    assert cells(row, result(ratio=0.97)) == ["**0.97**", "–"]
    assert cells(row, result(trusted=False)) == ["–", "–"]
    assert cells(Row("× another", QR, "another"), result()) == ["–", "–"]
    assert cells(Row("some", QR, "torch.linalg", ("12x768",)), result()) == ["2.00", ""]


def test_the_fastest_baseline_is_the_smallest_ratio():
    assert cells(Row("fastest", QR, FASTEST), result(ratios={"a": 3.0, "b": 1.5}))[0] == "1.50"


def test_without_every_baseline_the_fastest_is_not_known():
    """As after --no-compile."""
    left_out = result(baselines=["torch.linalg", "compiled torch.linalg"])
    assert cells(Row("fastest", QR, FASTEST), left_out)[0] == "–"
    assert cells(Row("× torch", QR, "torch.linalg"), left_out)[0] == "2.00"


def test_memory_is_ours_and_theirs():
    row = Row("memory", QR, "memory of torch.linalg")
    assert cells(row, result())[0] == "1.0 / 2.5"
    assert cells(row, result(memory={"ours": 3_000_000, "torch.linalg": 2_000_000}))[0] == "**3.0 / 2.0**"
    assert cells(row, result(memory={"ours": None, "torch.linalg": None}))[0] == "–"


def test_a_wrong_baseline_has_no_figure_and_its_message_is_kept():
    checks = {"ours": {"passed": True, "message": ""}, "torch.linalg": {"passed": False, "message": "error 1"}}
    kept = publish.summarize([run(result(checks=checks, ratios={}))])["results"][NAME]
    assert kept["median_ms"] == {"ours": 1.0} and kept["checks"]["failed"] == {"torch.linalg": "error 1"}


def test_the_letters_of_a_shape_stay():
    assert table().markdown({}).splitlines()[0] == "| times | 12×768 | 64×65 softmax |"


# Runs.


def test_of_two_runs_the_undisturbed_one_counts_and_then_the_later():
    summary = publish.summarize([run(result(ratio=2.0)), run(result(ratio=3.0, trusted=False))])
    assert summary["results"][NAME]["ratios"] == {"torch.linalg": 2.0}
    incomplete = result(ratio=3.0, baselines=["torch.linalg", "compiled torch.linalg"])
    assert publish.summarize([run(result(ratio=2.0)), run(incomplete)])["results"][NAME]["complete"]
    summary = publish.summarize([run(result(ratio=2.0)), run(result(ratio=3.0))])
    assert summary["results"][NAME]["ratios"] == {"torch.linalg": 3.0}


def test_cases_beyond_the_standard_set_are_left_out():
    assert publish.summarize([run(result(name="qr 4096x16 float64 forward"))])["results"] == {}


def test_runs_of_two_machines_do_not_make_one_table():
    other = run(result(), machine={**MACHINE, "threads": 4})
    with pytest.raises(publish.RunsDoNotFit, match="differ in threads"):
        publish.summarize([run(result()), other])


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"format": 1}', "not a run of this version"), (json.dumps(run(quick=True)), "a quick run"), ("[]", "not a run")],
)
def test_what_is_no_run_is_refused(tmp_path, content, message, capsys):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert main(["bench", "--publish", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A checkout with old figures in its pages."""
    from overtone.benchmarks.harness import checkout

    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in (publish.README, publish.PAGE):
        (tmp_path / page).write_text(f"before\n{publish.BEGIN}\nold figures\n{publish.END}\nafter\n")
    (tmp_path / "run.json").write_text(json.dumps(run(result(ratio=2.5), result("qr 12x192 float32 forward", 0.5))))
    return tmp_path


@pytest.mark.parametrize("option", ["--publish", "--readme"])
def test_the_command_writes_four_files(clone, capsys, option):
    pytest.importorskip("matplotlib")
    assert main(["bench", option, str(clone / "run.json")]) == 0
    readme, page = ((clone / name).read_text() for name in (publish.README, publish.PAGE))
    for text in (readme, page):
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old figures" not in text
        assert "commit 0123456789" in text
    assert "| × `torch.linalg` | – | **0.50** | – | 2.50 |" in page
    assert "– / – / 0.50–2.50×" in readme and "We publish losses too: `qr` 0.50× at 12x192." in readme
    written = (clone / publish.DATA).read_text()
    assert "the name of a machine" not in written
    assert set(json.loads(written)["results"]) == {NAME, "qr 12x192 float32 forward"}
    assert (clone / publish.PLOT).read_bytes().startswith(b"\x89PNG")
    assert publish.pages(json.loads(written), clone) == {publish.README: readme, publish.PAGE: page}
    said = capsys.readouterr().err
    assert "written: README.md" in said and ("--readme is deprecated, use --publish" in said) == (option == "--readme")


def test_no_file_is_written_where_one_page_has_no_marks(clone):
    (clone / publish.PAGE).write_text("nothing")
    assert main(["bench", "--publish", str(clone / "run.json")]) == 2
    assert "old figures" in (clone / publish.README).read_text() and not (clone / publish.DATA).exists()


# README's short table.


def highlight(*results: dict, metric: str = FASTEST) -> str:
    row = tables.Highlight("qr", (("qr 12x192 float32 forward", NAME),), metric, "torch")
    return row.range(publish.summarize([run(*results)])["results"])


def test_a_highlight_is_the_range_of_what_is_known():
    small = "qr 12x192 float32 forward"
    assert highlight(result(ratio=2.0), result(small, 14.6)) == "2.00–15×"
    assert highlight(result(ratio=2.0), result(small, 2.001)) == "2.00×"
    assert highlight(result(ratio=2.0), result(small, 0.5, trusted=False)) == "2.00×"
    assert highlight() == "–" and highlight(result(), metric="another") == "–"


def test_every_highlight_is_of_published_cases():
    names = {name for row in tables.HIGHLIGHTS for group in row.groups for name in group}
    assert names and names <= tables.standard_names()


def test_losses_name_the_op_and_its_shapes():
    found = publish.summarize(
        [run(result(ratio=0.9), result("qr 12x192 float32 forward", 0.5), result("qr 12x384 float32 forward", 2.0))]
    )
    assert list(tables.losses(found["results"])) == ["`qr` 0.50–0.90× at 12x192 and 12x768"]


def test_an_edited_checkout_is_named_so():
    edited = {**MACHINE, "commit": "0123456789abcdef+changes"}
    summary = publish.summarize([run(machine=edited), run()])
    for region in (publish.highlights(summary), publish.tables(summary)):
        assert "commit 0123456789+changes, 0123456789" in " ".join(region.split())


def test_a_page_without_marks_is_refused():
    with pytest.raises(publish.RunsDoNotFit, match="page.md: wanted the marks"):
        publish.replaced("nothing", "figures", "page.md")
