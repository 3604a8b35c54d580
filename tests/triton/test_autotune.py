"""Autotuning of attention's blocks without a GPU: the timer is a fake, launches are recorded instead of made."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from ops.test_attention import random_call
from support.attention_calls import run_both_ways
from support.fake_driver import recording
from support.interpreter import needs_triton

pytestmark = needs_triton

EIGENVALUES = 8  # bit of `needs`: the gradient that takes one tuned kernel, heads_gradient


class FakeTimer:
    """Stands in for autotune.measure: the time is a function of the launch, which is recorded instead of made."""

    def __init__(self) -> None:
        self.timed: list[dict] = []
        self.time_of = lambda meta: 1.0

    def __call__(self, run, device) -> float:
        from overtone.triton_kernels.runtime import record_launches

        with record_launches() as launches:
            run()
        self.timed.append(launches[0].meta)
        return self.time_of(launches[0].meta)


@pytest.fixture
def autotune(monkeypatch, tmp_path):
    """Switched on, with a GPU that is not there and a cache of its own."""
    from overtone.triton_kernels import autotune

    monkeypatch.setenv("OVERTONE_AUTOTUNE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "_known", {})
    monkeypatch.setattr(autotune, "gpu_name", lambda device: "Imaginary 100")
    monkeypatch.setattr(autotune, "is_capturing", lambda device: False)
    return autotune


@pytest.fixture
def timer(monkeypatch, autotune) -> FakeTimer:
    timer = FakeTimer()
    monkeypatch.setattr(autotune, "measure", timer)
    return timer


def eigenvalue_gradient(architecture="sm_90", mask=None, is_causal=False, **sizes) -> dict:
    """What heads_gradient_kernel is launched with."""
    from overtone.triton_kernels.attention import launch as attention
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    sizes = {"batch": 2, "heads": 3, "queries": 70, "keys": 70, "width": 64, "dtype": torch.float16} | sizes
    *call, residual, _, _ = (a if a is None else a.detach() for a in random_call(**sizes))
    heads = torch.empty(*residual.shape[:2], call[3].numel(), dtype=residual.dtype)
    rest = mask, is_causal, 0.125, heads, torch.empty(0), EIGENVALUES
    with assume_architecture(architecture), record_launches() as launches:
        attention.backward(residual, None, None, residual, None, None, *call, *rest)
    return launches[0].meta


def blocks_of(meta: dict) -> tuple:
    return tuple(meta[name] for name in ("BM", "BK", "num_warps", "num_stages"))


SHIPPED = (128, 64, 8, 3)  # heads_gradient in half precision on sm_90
NEIGHBOURS = [
    (64, 64, 8, 3), (256, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 16, 3),
    (128, 64, 8, 2), (128, 64, 8, 4),
]  # fmt: skip


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_by_default(autotune, timer, monkeypatch, tmp_path, value):
    monkeypatch.delenv("OVERTONE_AUTOTUNE") if value is None else monkeypatch.setenv("OVERTONE_AUTOTUNE", value)
    assert blocks_of(eigenvalue_gradient()) == SHIPPED
    assert timer.timed == [] and list(tmp_path.iterdir()) == []


def test_other_values_are_refused(autotune, monkeypatch):
    monkeypatch.setenv("OVERTONE_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="OVERTONE_AUTOTUNE='yes': wanted 0 or 1"):
        eigenvalue_gradient()


def test_only_where_there_is_a_gpu(timer, monkeypatch):
    """Not on CPU tensors, not in the interpreter."""
    from overtone.triton_kernels import autotune

    monkeypatch.undo()
    monkeypatch.setenv("OVERTONE_AUTOTUNE", "1")
    monkeypatch.setattr(autotune, "measure", timer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 100")
    assert blocks_of(eigenvalue_gradient()) == SHIPPED and timer.timed == []
    assert autotune.gpu_name(torch.device("cuda", 0)) == "Imaginary 100"
    assert autotune.gpu_name(torch.device("meta")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert autotune.gpu_name(torch.device("cuda", 0)) is None


def test_the_fastest_is_chosen_and_cached(autotune, timer, tmp_path):
    import triton

    import overtone

    timer.time_of = lambda meta: abs(meta["num_warps"] - 4)
    assert blocks_of(eigenvalue_gradient()) == (128, 64, 4, 3)
    assert [blocks_of(meta) for meta in timer.timed] == [SHIPPED, *NEIGHBOURS]
    assert blocks_of(eigenvalue_gradient()) == (128, 64, 4, 3)
    autotune._known.clear()  # as another process begins
    timer.time_of = lambda meta: 1.0
    assert blocks_of(eigenvalue_gradient()) == (128, 64, 4, 3)
    assert len(timer.timed) == 9
    assert [path.name for path in (tmp_path / "overtone").iterdir()] == ["autotune.json"]
    section = f"Imaginary 100, triton {triton.__version__}, overtone {overtone.__version__}"
    entry = "heads_gradient sm_90 float16 ieee D=64 E=24 N<=128 M<=128 plain full"
    cached = json.loads((tmp_path / "overtone" / "autotune.json").read_text())
    assert cached == {section: {entry: "BM=128 BK=64 num_warps=4 num_stages=3"}}


def test_of_equals_the_shipped_is_kept(timer):
    assert blocks_of(eigenvalue_gradient()) == SHIPPED and len(timer.timed) == 9


@pytest.mark.parametrize("of", ["gpu_name", "triton", "overtone"])
def test_another_gpu_or_version_times_again(autotune, timer, monkeypatch, of):
    import triton

    import overtone

    eigenvalue_gradient()
    autotune._known.clear()
    if of == "gpu_name":
        monkeypatch.setattr(autotune, "gpu_name", lambda device: "Imaginary 200")
    else:
        monkeypatch.setattr({"triton": triton, "overtone": overtone}[of], "__version__", "99")
    eigenvalue_gradient()
    assert len(timer.timed) == 18
    assert len(json.loads(autotune._path().read_text())) == 2


@pytest.mark.parametrize(
    "other, again",
    [
        ({"batch": 5}, False), ({"queries": 65}, False), ({"queries": 128, "keys": 128}, False),
        ({"queries": 129}, True), ({"keys": 64}, True), ({"dtype": torch.bfloat16}, True), ({"width": 63}, True),
        ({"channels": 25}, True), ({"is_causal": True}, True), ({"architecture": "sm_80"}, True),
        ({"mask": torch.ones(2, 3, 70, 70, dtype=torch.bool)}, True),
    ],
)  # fmt: skip
def test_what_a_choice_holds_for(timer, other, again):
    eigenvalue_gradient()
    before = len(timer.timed)
    eigenvalue_gradient(**other)
    assert (len(timer.timed) > before) == again


def test_an_empty_call_is_not_timed(autotune, timer):
    for size in ("batch", "queries", "keys", "channels"):
        eigenvalue_gradient(**{size: 0})
    assert timer.timed == [] and not autotune._path().exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"Imaginary 100": 1}'])
def test_a_broken_cache_is_a_warning_and_replaced(autotune, timer, content):
    autotune._path().parent.mkdir()
    autotune._path().write_bytes(content)
    with pytest.warns(UserWarning, match="autotune.json cannot be read, so blocks are timed again"):
        eigenvalue_gradient()
    assert len(timer.timed) == 9
    autotune._known.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eigenvalue_gradient()
    assert len(timer.timed) == 9


@pytest.mark.parametrize("entry", ["BM=4096 BK=64 num_warps=8 num_stages=3", "", None, 7, {"BM": 64}])
def test_blocks_that_are_no_candidates_are_not_believed(autotune, timer, entry):
    eigenvalue_gradient()
    content = json.loads(autotune._path().read_text())
    (entries,) = content.values()
    entries.update(dict.fromkeys(entries, entry), other="kept")
    autotune._path().write_text(json.dumps(content))
    autotune._known.clear()
    assert blocks_of(eigenvalue_gradient()) == SHIPPED and len(timer.timed) == 18
    (entries,) = json.loads(autotune._path().read_text()).values()
    assert sorted(entries.values()) == ["BM=128 BK=64 num_warps=8 num_stages=3", "kept"]


def test_a_cache_that_cannot_be_written_is_a_warning(autotune, timer, monkeypatch):
    """The choice holds for this process; a file that was there stays as it was, with nothing beside it."""
    from pathlib import Path

    eigenvalue_gradient()
    before = autotune._path().read_text()

    def replace(self, target):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "replace", replace)
    timer.time_of = lambda meta: meta["BM"]
    with pytest.warns(UserWarning, match="cannot be written"):
        assert eigenvalue_gradient(channels=40)["BM"] == 64
    assert eigenvalue_gradient(channels=40)["BM"] == 64
    assert len(timer.timed) == 18
    assert autotune._path().read_text() == before
    assert [path.name for path in autotune._path().parent.iterdir()] == ["autotune.json"]


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_a_cache_folder_that_is_a_file_is_a_warning(timer, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    timer.time_of = lambda meta: meta["BM"]
    with pytest.warns(UserWarning, match="cannot be written"):
        assert eigenvalue_gradient()["BM"] == 64


def test_nothing_is_timed_while_a_graph_is_captured(autotune, timer, monkeypatch):
    """The table is used and not remembered; what is known or cached by then is used."""
    timer.time_of = lambda meta: meta["BM"]
    monkeypatch.setattr(autotune, "is_capturing", lambda device: True)
    assert blocks_of(eigenvalue_gradient()) == SHIPPED
    assert timer.timed == [] and not autotune._path().exists()
    monkeypatch.setattr(autotune, "is_capturing", lambda device: False)
    assert eigenvalue_gradient()["BM"] == 64
    monkeypatch.setattr(autotune, "is_capturing", lambda device: True)
    assert eigenvalue_gradient()["BM"] == 64
    autotune._known.clear()
    assert eigenvalue_gradient()["BM"] == 64


def test_candidates_that_fail_are_skipped(timer):
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    failures = {
        (64, 64, 8, 3): OutOfResources(300_000, 200_000, "shared memory"),
        (128, 64, 4, 3): CompilationError("", None, "no such layout"),
        (128, 32, 8, 3): RuntimeError("PassManager::run failed"),
    }

    def time_of(meta):
        if blocks_of(meta) in failures:
            raise failures[blocks_of(meta)]
        return {SHIPPED: 3.0, (128, 64, 8, 2): 1.0}.get(blocks_of(meta), 2.0)

    timer.time_of = time_of
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blocks_of(eigenvalue_gradient()) == (128, 64, 8, 2)
    assert len(timer.timed) == 9


def test_if_all_fail_the_table_is_used(autotune, timer):
    """Not cached, as another process may have more memory, but not tried at every launch either."""

    def time_of(meta):
        raise torch.OutOfMemoryError("no memory left")

    timer.time_of = time_of
    with pytest.warns(UserWarning, match="nothing could be timed for 'heads_gradient .* no memory left"):
        assert blocks_of(eigenvalue_gradient()) == SHIPPED
    assert blocks_of(eigenvalue_gradient()) == SHIPPED
    assert len(timer.timed) == 9 and not autotune._path().exists()


def test_errors_of_ours_are_not_swallowed(timer):
    def time_of(meta):
        raise TypeError("a mistake in a launcher")

    timer.time_of = time_of
    with pytest.raises(TypeError, match="a mistake"):
        eigenvalue_gradient()


def test_every_kernel_is_launched_with_its_choice(autotune, timer):
    """Grids and scratch follow the blocks, forward and backward, in all forms."""
    from overtone.triton_kernels.attention import launch as attention
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    timer.time_of = lambda meta: meta["BM"] + meta["num_warps"] / 100  # the smallest BM wins
    names = set()
    for architecture, queries, channels in (("sm_90", 300, 384), ("sm_90", 197, 192), ("gfx1100", 300, 192)):
        args = random_call(2, 3, queries, queries, 128 if "gfx" in architecture else 64, channels, torch.float16)
        with assume_architecture(architecture):
            with record_launches() as launches:
                run_both_ways(attention, args, needs=31)
            table = attention.configs.table(architecture, torch.float16, "ieee", args[0].shape[-1], masked=False)
        for launch in launches:
            name = launch.kernel.fn.__name__.removesuffix("_kernel")
            if "BM" not in launch.meta:
                continue
            names.add(name)
            shipped = table.blocks.get(name) or table.blocks["key_value_apart"]
            shipped = {"fused": table.fused(channels, queries), "attention": table.attention(queries)}.get(
                name, shipped
            )
            assert launch.meta["BM"] == max(shipped.tile["BM"] // 2, 16)
            tokens = 2 * -(-queries // launch.meta["BM"])
            if name in ("fused", "projection"):
                values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
                assert values["p_statistics"].shape == (tokens, 4, channels)
                assert launch.grid == (tokens * (-(-channels // launch.meta["BE"]) if name == "projection" else 1),)
            if name in ("attention", "query_gradient", "heads_gradient"):
                assert launch.grid == (3 * tokens,)
    assert names | {"attention_whole", "fused_whole", "key_value_apart"} == set(attention.configs.TILES)


def test_whole_rows_stay_whole(autotune):
    from overtone.triton_kernels.attention import config as attention_configs

    shipped = attention_configs.table("sm_90", torch.float16, "ieee", 64, masked=False).attention(197)
    for blocks in autotune.candidates("attention", shipped):
        assert blocks.tile["BN"] == 256 and blocks.tile["WHOLE"] and blocks.num_stages == shipped.num_stages


def test_what_the_hardware_refuses_is_skipped_and_the_winner_launched(autotune, monkeypatch):
    """Triton itself compiles the candidates and refuses those whose shared memory is too much."""
    from overtone.tools import triton_aot as aot
    from overtone.triton_kernels.attention import launch as attention
    from overtone.triton_kernels.runtime import assume_architecture

    *call, residual, _, _ = (
        a if a is None else a.detach() for a in random_call(2, 3, 70, 70, 64, 64, dtype=torch.float16)
    )
    rest = None, False, 0.125, torch.empty(2, 70, 192, dtype=torch.float16), torch.empty(0), EIGENVALUES
    limit = 80_000  # bytes; the shipped blocks take 64 KiB or more
    timed = []

    def measure(run, device):
        run()
        timed.append(launches[-2])
        return -launches[-2].metadata.shared  # whoever takes most of what there is wins

    monkeypatch.setattr(autotune, "measure", measure)
    with assume_architecture("sm_90"), recording(aot.ARCHITECTURES["sm_90"].target, limit) as launches:
        attention.backward(residual, None, None, residual, None, None, *call, *rest)
    assert 1 < len(timed) < 9
    assert launches[-2].name == "heads_gradient_kernel"
    assert launches[-2].metadata.shared == max(launch.metadata.shared for launch in timed) <= limit


class FakeEvent:
    """Of a device on which every launch takes 2 ms, but for the first two, which take 50."""

    launches = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = 2 * FakeEvent.launches + 48 * min(FakeEvent.launches, 2)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_the_timer_is_tritons_on_the_tensors_device(monkeypatch):
    from contextlib import contextmanager
    from types import SimpleNamespace

    from triton.runtime.driver import driver

    from overtone.triton_kernels import autotune

    current = []

    @contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    device = torch.device("cuda", 1)

    def run():
        assert current == [device]
        FakeEvent.launches += 1

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(FakeEvent, "launches", 0)
    interface = SimpleNamespace(Event=FakeEvent, synchronize=lambda: None)
    gpu = SimpleNamespace(
        get_device_interface=lambda: interface,
        get_empty_cache_for_benchmark=lambda: None,
        clear_cache=lambda cache: None,
    )
    monkeypatch.setattr(driver, "_active", gpu)
    assert autotune.measure(run, device) == 2 and 6 < FakeEvent.launches < 100
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == [device])
    assert autotune.is_capturing(device) and current == []
