"""The study: its claims come out on a quick one, its report stands alone, and what is finished is not repeated."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import re
import signal
import time

import pytest
import torch
from support import browser, cifar
from support import runs as processes

import overtone as ot
from overtone import cli

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("sklearn", reason="needs scikit-learn")

from overtone.study import Plan, study
from overtone.study import runs as study_runs
from overtone.study.corruptions import SEVERITIES, STRENGTHS, corrupted
from overtone.study.escalation import BLOCK_METRICS, block_measures
from overtone.study.stats import CAME_OUT, DID_NOT, T_975, UNDECIDED, Difference, MeanStd
from overtone.study.tables import all_tables, ranking
from overtone.training import ConfigError, checkpoint

PLAN = Plan.of(
    "digits",
    quick=True,
    epochs=1,
    depths=(2, 4),
    parts=("depth", "kinds", "text", "methods"),
    methods=["plain", "centered"],
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A quick study, by two processes."""
    return study(PLAN, tmp_path_factory.mktemp("study"), jobs=2, progress=False)


class TestClaims:
    def test_all_come_out(self, outcome):
        assert outcome.all_claims_hold and len(outcome.claims) == 5

    def test_a_random_vit_base_smooths_in_every_case(self, outcome):
        counts = outcome.results.untrained.vit_base
        assert counts == {"perron": 1 * 2 * 12, "other": 0, "tie": 0, "close": 0, "invalid": 0}

    @pytest.mark.parametrize("regime, verdict", [("smooth", "perron"), ("sharpen", "other")])
    def test_the_regime_decides_whatever_was_learnt(self, outcome, regime, verdict):
        (measures,) = outcome.results.of(regime)
        cases = PLAN.images * PLAN.config.model.depth * PLAN.config.model.num_heads
        assert measures["trained"]["verdicts"][verdict] == cases
        assert sum(measures["trained"]["verdicts"].values()) == cases

    def test_de_escalation_keeps_token_similarity_at_zero(self, outcome):
        curves = outcome.results.untrained.de_escalated
        assert max(curves[1.0][1:]) <= torch.finfo(torch.float32).eps
        assert curves[1.0][-1] < curves[0.5][-1] < curves[0.1][-1] < outcome.results.untrained.similarity["post"][-1]

    def test_a_negative_norm_swaps_the_regimes_before_attention_and_not_after(self, outcome):
        curves = outcome.results.untrained.norm_signs
        # The bounded spectrum keeps ψ, from which λ and −λ come to a few units in the last place.
        for norm, swapped in (("pre", True), ("post", False)):
            for regime, opposite in (("smooth", "sharpen"), ("sharpen", "smooth")):
                other = curves[norm, opposite if swapped else regime, 1]
                assert curves[norm, regime, -1] == pytest.approx(other, rel=1e-3)
        assert curves["pre", "smooth", 1][-1] < curves["pre", "smooth", 1][0] < curves["pre", "sharpen", 1][-1]

    def test_a_claim_that_does_not_come_out_is_told(self, outcome):
        untrained = outcome.results.untrained
        spoiled = untrained._replace(
            de_escalated=untrained.de_escalated | {1.0: [0.0, 1e-3]},
            vit_base=untrained.vit_base | {"close": 1},
            norm_signs=untrained.norm_signs | {("pre", "smooth", -1): untrained.norm_signs["pre", "smooth", 1]},
        )
        claims = dataclasses.replace(outcome.results, untrained=spoiled).claims()
        assert [claim.holds for claim in claims] == [False, True, True, False, False]


class TestReport:
    def test_files(self, outcome):
        folder = outcome.report.parent
        tables = all_tables(outcome.results)
        for name, table in tables.items():
            rows = list(csv.reader((folder / f"{name}.csv").open(newline="")))
            assert [name for name in rows[0] if not name.endswith(" std")] == list(table.columns)
            assert len(rows) == 1 + len(table.rows) and not any("±" in cell for row in rows for cell in row)
        pictures = sorted(path.name for path in folder.glob("*.png"))
        assert pictures == sorted(
            f"{name}.png" for name in re.findall(r'id="figure-([^"]*)"', outcome.report.read_text())
        )
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)

    def test_ours_stand_beside_the_papers(self, outcome):
        rows = all_tables(outcome.results)["table2-less-data"].rows
        ours = {row[0]: row[2:] for row in rows if row[1] == "digits"}
        assert str(ours["ViT⁻"][2]) == f"{100 * outcome.results.of('sharpen', 0.1)[0]['accuracy']:.2f}"
        assert ["ViT⁺", "paper, CIFAR-100", "64.34", "55.21", "28.67"] in rows

    def test_the_page_in_a_browser(self, outcome, tmp_path):
        with browser.running(tmp_path) as tab:
            tab.open(outcome.report)
            assert (tab.requests(), tab.complaints()) == ([], [])
            assert tab.evaluate("document.querySelectorAll('figure svg').length") == 13 + 6 + 1 + 1 + 4
            tab.open(outcome.report, width=390)
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390


class TestRestart:
    def test_a_finished_study_only_writes_again(self, outcome, monkeypatch):
        monkeypatch.setattr(study_runs, "train", None)
        before = {path: path.read_bytes() for path in outcome.report.parent.glob("*.csv")}
        again = study(PLAN, outcome.report.parent, progress=False)
        assert again.results == outcome.results
        assert {path: path.read_bytes() for path in before} == before

    def test_a_lost_measurement_is_taken_again_without_training(self, outcome):
        run = PLAN.runs_of("regimes")[0]
        folder = outcome.report.parent / "runs"
        path = folder / run.folder_name / f"{run.part}.json"
        text = path.read_text()
        path.write_text(text[:100])
        weights = (folder / run.folder_name / checkpoint.CHECKPOINT).read_bytes()
        assert study_runs.run_all([run], folder, images=PLAN.images, progress=False) == {run: outcome.results.runs[run]}
        assert path.read_text() == text
        assert (folder / run.folder_name / checkpoint.CHECKPOINT).read_bytes() == weights

    def test_a_killed_study_goes_on(self, tmp_path):
        """Its processes end with it, and the run that was under way comes to the same result."""
        run = next(run for run in PLAN.runs_of("regimes") if run.fraction == 0.1)
        (study_process,) = processes.start(_two_at_a_time, run, tmp_path)
        metrics = tmp_path / run.folder_name / "metrics.csv"
        _wait_for(metrics.exists)
        os.kill(study_process.pid, signal.SIGKILL)
        study_process.join()
        _wait_for(lambda: _is_free(tmp_path / run.folder_name))
        for folder in (tmp_path, tmp_path / "undisturbed"):
            study_runs.run_all([run], folder, images=PLAN.images, progress=False)
        killed, undisturbed = (
            checkpoint.read_tensors(folder / run.folder_name / checkpoint.WEIGHTS)
            for folder in (tmp_path, tmp_path / "undisturbed")
        )
        assert all(torch.equal(killed[name], value) for name, value in undisturbed.items())

    def test_a_runs_folder_is_named_by_all_that_decides_it(self):
        names = {run.folder_name for plan in (PLAN, Plan.of("digits")) for run in plan.runs_of("regimes")}
        assert len(names) == 9 + 27
        run = PLAN.runs()[0]
        assert run._replace(config=run.config.replace(num_workers=7)).folder_name == run.folder_name
        assert run._replace(config=run.config.replace(learning_rate=1e-4)).folder_name != run.folder_name


def _two_at_a_time(run, folder) -> None:
    another = run._replace(seed=1, config=run.config.replace(seed=1))
    study_runs.run_all([run, another], folder, images=PLAN.images, jobs=2, progress=False)


def _wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def _is_free(folder) -> bool:
    try:
        with checkpoint.locked(folder):
            return True
    except checkpoint.CheckpointError:
        return False


class TestComparisons:
    def test_runs_with_the_same_training_are_trained_once(self, outcome):
        runs = PLAN.runs()
        folders = {run.folder_name for run in runs}
        assert {path.name for path in (outcome.report.parent / "runs").iterdir()} == folders
        shared = [run for run in runs if run.folder_name == PLAN.runs_of("regimes")[0].folder_name]
        assert {run.part for run in shared} == {"regimes", "depth", "kinds", "methods"}
        assert len({outcome.results.runs[run]["accuracy"] for run in shared}) == 1

    def test_every_variant_is_in_its_table(self, outcome):
        tables = all_tables(outcome.results)
        for part, name in (("depth", "depth-accuracy"), ("kinds", "kinds"), ("text", "text"), ("methods", "methods")):
            assert [row[0] for row in tables[name].rows] == outcome.results.variants(part)
        depth = {row[0]: row[2:] for row in tables["depth-accuracy"].rows}
        (deep,) = outcome.results.select("depth", "pre-norm", depth=4)
        assert depth["pre-norm"][1] == MeanStd.of([100 * deep["accuracy"]])
        blocks = tables["depth-blocks"]
        assert len(blocks.rows) == 8 * 2 * 4 + 3 * 8 and len(blocks.columns) == 3 + len(BLOCK_METRICS)

    def test_v_stays_well_conditioned(self, outcome):
        limit = PLAN.config.model.condition_limit
        for run, measures in outcome.results.runs.items():
            if run.part in ("kinds", "methods"):
                assert len(measures["conditions"]) == (run.epochs if run.config.model.kind == "general" else 0)
                assert all(1 <= condition <= limit for condition in measures["conditions"])

    def test_one_seed_decides_nothing_and_says_so(self, outcome):
        rows = all_tables(outcome.results)["findings"].rows
        assert {row[0] for row in rows} == {UNDECIDED}
        assert {row[2] for row in rows} == {"Dovonon et al.", "Dovonon et al. (version 2)", "Yu and Zhang", "–"}

    def test_cifar_from_the_archive_to_the_report(self, monkeypatch, tmp_path):
        cifar.small_cifar10(tmp_path, monkeypatch, train=400, test=20)
        arguments = ["--data", "cifar10", "--data-dir", str(tmp_path), "--quick", "--epochs", "1", "--parts", "kinds"]
        assert cli.main(["study", *arguments, "--jobs", "1", "--out", str(tmp_path / "report")]) == 0
        page = (tmp_path / "report" / "report.html").read_text()
        assert "on cifar10" in page and "V Λ V⁻¹" in page
        assert (tmp_path / "report" / "kinds.csv").exists() and not (
            tmp_path / "report" / "depth-accuracy.csv"
        ).exists()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("options", [{}, {"method": "de_escalation", "filter_place": "attention", "strength": 0.5}])
def test_measures_of_blocks_are_what_they_say(norm, options):
    """Against the model written out, block by block."""
    torch.manual_seed(0)
    config = ot.models.ViTConfig(
        image_size=8, patch_size=2, num_classes=4, dim=12, num_heads=2, depth=2, norm=norm, **options
    )
    model = ot.models.VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, labels = torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2])
    found = block_measures(model, images, labels)
    assert set(found) == set(BLOCK_METRICS)
    x = torch.cat((model.cls_token.expand(3, -1, -1), model.patch_embed(images)), 1) + model.pos_embed
    for place, block in enumerate(model.blocks):
        y = block(x)[0]
        update = block.attn(block.attention_input(x))
        mixed = x + (block.filter(update) if options else update)
        assert found["similarity"][place] == pytest.approx(ot.token_similarity(x).median().item(), rel=1e-4)
        assert found["stream"][place] == pytest.approx(x.norm(dim=(1, 2)).median().item(), rel=1e-4)
        assert found["update"][place] == pytest.approx((y - x).norm(dim=(1, 2)).median().item(), rel=1e-4)
        rate = ot.token_diversity(x) / ot.token_diversity(mixed)
        assert found["rate"][place] == pytest.approx(rate.median().item(), rel=1e-4)
        x = y
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    gradients = [torch.cat([p.grad.flatten() for p in block.parameters()]).norm().item() for block in model.blocks]
    assert found["gradient"] == pytest.approx(gradients, rel=1e-4)


def test_the_estimate_of_the_rate_is_right_for_random_weights():
    """Where attention is (1 − e)I + eΠ, whose |λ₂| is 1 − e, and W is random, it is the mean of the rate."""
    torch.manual_seed(0)
    n, dim, share = 16, 256, 0.6
    x = torch.randn(200, n, dim, dtype=torch.float64) + 0.5 * torch.randn(200, 1, dim, dtype=torch.float64)
    mixing = (1 - share) * torch.eye(n, dtype=torch.float64) + share / n
    weight = torch.randn(dim, dim, dtype=torch.float64) / dim**0.5
    rate = ot.escalation_rate(x, x + mixing @ x @ weight)
    size = weight.square().sum() / dim
    contraction = (1 + size) / (1 + size * (1 - share) ** 2)
    estimate = 1 + ot.token_similarity(x) * (contraction - 1)
    assert (rate / estimate).mean().item() == pytest.approx(1, abs=0.01)


class TestCorruptions:
    IMAGES = (torch.arange(6 * 3 * 12 * 12) * 37 % 256).to(torch.uint8).view(6, 3, 12, 12)

    @pytest.mark.parametrize("kind", STRENGTHS)
    def test_each_severity_is_further_from_the_image(self, kind):
        images = corrupted(self.IMAGES, "blur", 3)  # smoother than noise, as images are
        changes = [(corrupted(images, kind, s).double() - images.double()).square().mean() for s in SEVERITIES]
        assert 0 < changes[0] and all(less < more for less, more in zip(changes, changes[1:], strict=False))

    @pytest.mark.parametrize("kind", STRENGTHS)
    def test_an_image_is_corrupted_alike_in_every_call(self, kind):
        found = corrupted(self.IMAGES, kind, 2)
        assert found.dtype == torch.uint8 and found.shape == self.IMAGES.shape
        assert torch.equal(corrupted(self.IMAGES[:4], kind, 2), found[:4])

    def test_noise_has_the_deviation_it_says(self):
        grey = torch.full((200, 1, 16, 16), 128, dtype=torch.uint8)
        noise = corrupted(grey, "noise", 1).double() - 128
        assert noise.std().item() == pytest.approx(255 * STRENGTHS["noise"][0], rel=0.02)  # of 51200 numbers
        assert abs(noise.mean().item()) < 4 * 255 * STRENGTHS["noise"][0] / math.sqrt(noise.numel())

    @pytest.mark.parametrize("kind, severity", [("fog", 1), ("noise", 0), ("noise", 6)])
    def test_mistakes(self, kind, severity):
        with pytest.raises(ValueError, match="corrupted: (kind|severity): got"):
            corrupted(self.IMAGES, kind, severity)


class TestWords:
    PAPER = {"free": 66.78, "smooth": 64.34, "sharpen": 66.62}

    @pytest.mark.parametrize(
        "means, std, expected",
        [
            ((66, 64, 65), 0.1, "as in the paper; first and last are 2.00 points apart"),
            ((64, 65, 66), 0.1, "ours are ViT⁻ > ViT⁺ > ViT; the paper's are ViT > ViT⁻ > ViT⁺"),
            ((66, 64, 65), 1.5, "not resolved"),
            ((66, 64, 65), math.nan, "prove nothing"),
        ],
    )
    def test_an_order_within_the_spread_is_not_claimed(self, means, std, expected):
        ours = {regime: MeanStd(mean, std) for regime, mean in zip(self.PAPER, means, strict=True)}
        assert expected in ranking("With all data", ours, self.PAPER)

    @pytest.mark.parametrize(
        "a, b, limit, verdict",
        [
            ((3.0, 4.0, 5.0), (1.0, 2.1, 2.9), 0, CAME_OUT),
            ((3.0, 4.0, 5.0), (1.0, 2.1, 2.9), 3, DID_NOT),
            ((3.0, 4.0, 5.0), (1.0, 2.1, 2.9), 2, UNDECIDED),
            ((1.0, 2.0, 3.0), (3.0, 1.0, 2.0), 0, UNDECIDED),
            ((3.0,), (1.0,), 0, UNDECIDED),
        ],
    )
    def test_a_paired_difference_decides_where_its_interval_does(self, a, b, limit, verdict):
        assert Difference.of(a, b).above(limit) == verdict

    def test_the_interval_is_students(self):
        scipy_stats = pytest.importorskip("scipy.stats", reason="needs scipy")
        for degrees, t in enumerate(T_975, 1):
            assert t == pytest.approx(scipy_stats.t.ppf(0.975, degrees), abs=6e-4)
        a, b = [1.0, 2.5, 4.0, 3.0], [0.5, 2.0, 4.5, 1.0]
        wanted = scipy_stats.ttest_rel(a, b).confidence_interval(0.95)
        found = Difference.of(a, b)
        assert (found.low, found.high) == pytest.approx(tuple(wanted), rel=1e-3)
        assert str(found) == f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"

    def test_one_seed_has_no_deviation(self):
        assert str(MeanStd.of([1.0])) == "1.00"
        assert str(MeanStd.of([1.0, 3.0])) == "2.00 ± 1.41"


class TestCommand:
    def test_it_ends_with_the_path_of_the_report(self, capsys, monkeypatch, outcome, tmp_path):
        monkeypatch.setattr("overtone.study.study", lambda *_, **__: outcome)
        assert cli.main(["study", "--quick", "--out", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == f"Report: {outcome.report}"

    def test_a_claim_that_fails_is_status_1(self, capsys, monkeypatch, outcome):
        failed = outcome._replace(claims=[outcome.claims[0]._replace(holds=False)])
        monkeypatch.setattr("overtone.study.study", lambda *_, **__: failed)
        assert cli.main(["study", "--quick"]) == 1

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--data", "letters"], "data: got 'letters', wanted one of digits, cifar10, cifar100"),
            (["--data", "cifar10"], "cifar10: data_dir is not given"),
            (["--parts", "width"], "parts: got 'width', wanted some of depth, kinds, text, methods"),
            (["--methods", "magic"], "methods: got 'magic', wanted some of plain, de_escalation"),
            (["--depths", "6", "0"], "depths: got 6, 0, wanted numbers of at least 1"),
            (["--data", "cifar100"], "cifar100: data_dir is not given"),
            (["--seeds", "0"], "seeds: got 0, wanted at least 1"),
        ],
    )
    def test_mistakes_are_told_before_anything_is_trained(self, capsys, tmp_path, arguments, message):
        assert cli.main(["study", *arguments, "--out", str(tmp_path / "new")]) == 2
        assert capsys.readouterr().err.startswith(f"overtone study: {message}")
        assert not (tmp_path / "new").exists()

    def test_jobs_below_one(self):
        with pytest.raises(ConfigError, match="jobs: got 0, wanted at least 1"):
            study(PLAN, "nowhere", jobs=0)
