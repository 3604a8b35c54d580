"""Autotuning of attention's tiles without a GPU: the timer is a fake, launches are recorded instead of made."""

from __future__ import annotations

import warnings

import pytest
import torch
from ops.test_attention import random_call
from support.attention_calls import run_both_ways
from support.fake_driver import recording
from support.interpreter import needs_triton

pytestmark = needs_triton

ADDEND = 0b1000000  # bit of output_mask: the gradient that takes one tuned kernel, dout


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
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_known", {})
    monkeypatch.setattr(autotune, "gpu_name", lambda device: "Imaginary 100")
    monkeypatch.setattr(autotune, "is_capturing", lambda device: False)
    return autotune


@pytest.fixture
def cached(tmp_path):
    """The files of choices that are cached."""
    return lambda: sorted((tmp_path / "cache").rglob("overtone_config.txt"))


@pytest.fixture
def timer(monkeypatch, autotune) -> FakeTimer:
    timer = FakeTimer()
    monkeypatch.setattr(autotune, "measure", timer)
    return timer


def addend_gradient(architecture="sm_90", mask=None, is_causal=False, **sizes) -> dict:
    """What dout_kernel is launched with."""
    from overtone.triton_kernels.attention import launch as attention
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    sizes = {"batch": 2, "heads": 3, "queries": 70, "keys": 70, "width": 64, "dtype": torch.float16} | sizes
    query, key, value, eigenvalues, basis, residual, *_ = (a if a is None else a.detach() for a in random_call(**sizes))
    attn_out = torch.empty(*residual.shape[:2], eigenvalues.numel(), dtype=residual.dtype)
    rest = mask, None, query, is_causal, 0.125, attn_out, torch.empty(0), ADDEND
    with assume_architecture(architecture), record_launches() as launches:
        attention.backward(residual, query, key, value, basis.float(), *rest)
    return launches[0].meta


def blocks_of(meta: dict) -> tuple:
    return tuple(meta[name] for name in ("BM", "BK", "num_warps", "num_stages"))


SHIPPED = (128, 64, 8, 3)  # dout in half precision on sm_90
NEIGHBORS = [
    (64, 64, 8, 3), (256, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 16, 3),
    (128, 64, 8, 2), (128, 64, 8, 4),
]  # fmt: skip


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_by_default(autotune, timer, monkeypatch, tmp_path, value):
    monkeypatch.delenv("OVERTONE_AUTOTUNE") if value is None else monkeypatch.setenv("OVERTONE_AUTOTUNE", value)
    assert blocks_of(addend_gradient()) == SHIPPED
    assert timer.timed == [] and not (tmp_path / "cache").exists()


def test_other_values_are_refused(autotune, monkeypatch):
    monkeypatch.setenv("OVERTONE_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="OVERTONE_AUTOTUNE='yes': wanted 0 or 1"):
        addend_gradient()


def test_only_where_there_is_a_gpu(timer, monkeypatch):
    """Not on CPU tensors, not in the interpreter."""
    from overtone.triton_kernels import autotune

    monkeypatch.undo()
    monkeypatch.setenv("OVERTONE_AUTOTUNE", "1")
    monkeypatch.setattr(autotune, "measure", timer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 100")
    assert blocks_of(addend_gradient()) == SHIPPED and timer.timed == []
    assert autotune.gpu_name(torch.device("cuda", 0)) == "Imaginary 100"
    assert autotune.gpu_name(torch.device("meta")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert autotune.gpu_name(torch.device("cuda", 0)) is None


def test_the_fastest_is_chosen_and_cached(autotune, timer, cached):
    timer.time_of = lambda meta: abs(meta["num_warps"] - 4)
    assert blocks_of(addend_gradient()) == (128, 64, 4, 3)
    assert [blocks_of(meta) for meta in timer.timed] == [SHIPPED, *NEIGHBORS]
    assert blocks_of(addend_gradient()) == (128, 64, 4, 3)
    autotune._known.clear()  # as another process begins
    timer.time_of = lambda meta: 1.0
    assert blocks_of(addend_gradient()) == (128, 64, 4, 3)
    assert len(timer.timed) == 9
    assert [file.read_text() for file in cached()] == ["BM=128 BK=64 num_warps=4 num_stages=3"]


def test_of_equals_the_shipped_is_kept(timer):
    assert blocks_of(addend_gradient()) == SHIPPED and len(timer.timed) == 9


@pytest.mark.parametrize("of", ["GPU", "Triton", "sources"])
def test_another_gpu_or_version_times_again(autotune, timer, monkeypatch, cached, of):
    import triton

    addend_gradient()
    autotune._known.clear()
    if of == "GPU":
        monkeypatch.setattr(autotune, "gpu_name", lambda device: "Imaginary 200")
    elif of == "Triton":
        monkeypatch.setattr(triton, "__version__", "99")
    else:
        monkeypatch.setattr(autotune, "source_digest", lambda: "of other kernels")
    addend_gradient()
    assert len(timer.timed) == 18
    assert len(cached()) == 2


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
    addend_gradient()
    before = len(timer.timed)
    addend_gradient(**other)
    assert (len(timer.timed) > before) == again


def test_an_empty_call_is_not_timed(timer, cached):
    for size in ("batch", "queries", "keys", "channels"):
        addend_gradient(**{size: 0})
    assert timer.timed == [] and not cached()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"BM=4096 BK=64 num_warps=8 num_stages=3", b"BM=128 BK=64 num_warps=8 num_stages=3\n"]
)
def test_what_is_no_candidate_is_not_believed(autotune, timer, cached, content):
    addend_gradient()
    (file,) = cached()
    file.write_bytes(content)
    autotune._known.clear()
    assert blocks_of(addend_gradient()) == SHIPPED and len(timer.timed) == 18
    assert file.read_text() == "BM=128 BK=64 num_warps=8 num_stages=3"


def test_a_broken_cache_is_a_warning_and_replaced(autotune, timer, cached):
    addend_gradient()
    (file,) = cached()
    file.write_bytes(b"\xff")
    autotune._known.clear()
    with pytest.warns(UserWarning, match="cache cannot be read, so configurations are timed again"):
        addend_gradient()
    assert len(timer.timed) == 18
    autotune._known.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        addend_gradient()
    assert len(timer.timed) == 18


def test_a_cache_that_cannot_be_written_is_a_warning(timer, monkeypatch, tmp_path):
    """The choice holds for this process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    timer.time_of = lambda meta: meta["BM"]
    with pytest.warns(UserWarning) as caught:
        assert addend_gradient()["BM"] == 64
    assert "cannot be read" in str(caught[0].message) and "cannot be written" in str(caught[1].message)
    assert addend_gradient()["BM"] == 64
    assert len(timer.timed) == 9


def test_nothing_is_timed_while_a_graph_is_captured(autotune, timer, monkeypatch, cached):
    """The table is used and not remembered; what is known or cached by then is used."""
    timer.time_of = lambda meta: meta["BM"]
    monkeypatch.setattr(autotune, "is_capturing", lambda device: True)
    assert blocks_of(addend_gradient()) == SHIPPED
    assert timer.timed == [] and not cached()
    monkeypatch.setattr(autotune, "is_capturing", lambda device: False)
    assert addend_gradient()["BM"] == 64
    monkeypatch.setattr(autotune, "is_capturing", lambda device: True)
    assert addend_gradient()["BM"] == 64
    autotune._known.clear()
    assert addend_gradient()["BM"] == 64


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
        assert blocks_of(addend_gradient()) == (128, 64, 8, 2)
    assert len(timer.timed) == 9


def test_if_all_fail_the_table_is_used(timer, cached):
    """Not cached, as another process may have more memory, but not tried at every launch either."""

    def time_of(meta):
        raise torch.OutOfMemoryError("no memory left")

    timer.time_of = time_of
    with pytest.warns(UserWarning, match="nothing could be timed for 'dout .* no memory left"):
        assert blocks_of(addend_gradient()) == SHIPPED
    assert blocks_of(addend_gradient()) == SHIPPED
    assert len(timer.timed) == 9 and not cached()


def test_errors_of_ours_are_not_swallowed(timer):
    def time_of(meta):
        raise TypeError("a mistake in a launcher")

    timer.time_of = time_of
    with pytest.raises(TypeError, match="a mistake"):
        addend_gradient()


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
                run_both_ways(attention, args, output_mask=0b1111)
            table = attention.configs.table(architecture, torch.float16, "ieee", args[0].shape[-1], masked=False)
        for launch in launches:
            name = launch.kernel.fn.__name__.removesuffix("_kernel")
            if "BM" not in launch.meta:
                continue
            names.add(name)
            shipped = table.by_kernel.get(name) or table.by_kernel["dkv_split"]
            shipped = {"fused": table.fused(channels, queries), "attention": table.attention(queries)}.get(
                name, shipped
            )
            assert launch.meta["BM"] == max(shipped.tile["BM"] // 2, 16)
            tokens = 2 * -(-queries // launch.meta["BM"])
            if name in ("fused", "projection"):
                values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
                assert values["p_moments"].shape == (tokens, 4, channels)
                assert launch.grid == (tokens * (-(-channels // launch.meta["E_TILE"]) if name == "projection" else 1),)
            if name in ("attention", "dq"):
                assert launch.grid == (3 * tokens,)
    assert names | {"attention_single_pass", "fused_single_pass", "dkv_split"} == set(attention.configs.TILES)


def test_a_single_pass_stays_one(autotune):
    from overtone.triton_kernels.attention import config as attention_configs

    shipped = attention_configs.table("sm_90", torch.float16, "ieee", 64, masked=False).attention(197)
    for blocks in autotune.candidates("attention", shipped):
        assert blocks.tile["BN"] == 256 and blocks.tile["SINGLE_PASS"] and blocks.num_stages == shipped.num_stages


def test_what_the_hardware_refuses_is_skipped_and_the_winner_launched(autotune, monkeypatch):
    """Triton itself compiles the candidates and refuses those whose shared memory is too much."""
    from overtone.tools import triton_aot as aot
    from overtone.triton_kernels.attention import launch as attention
    from overtone.triton_kernels.runtime import assume_architecture

    query, key, value, _, basis, residual, *_ = (
        a if a is None else a.detach() for a in random_call(2, 3, 70, 70, 64, 64, dtype=torch.float16)
    )
    rest = None, None, query, False, 0.125, torch.empty(2, 70, 192, dtype=torch.float16), torch.empty(0), ADDEND
    limit = 80_000  # bytes; the shipped tile takes 64 KiB or more
    timed = []

    def measure(run, device):
        run()
        timed.append(launches[-1])
        return -launches[-1].metadata.shared  # whoever takes most of what there is wins

    monkeypatch.setattr(autotune, "measure", measure)
    with assume_architecture("sm_90"), recording(aot.ARCHITECTURES["sm_90"].target, limit) as launches:
        attention.backward(residual, query, key, value, basis, *rest)
    assert 1 < len(timed) < 9
    assert launches[-1].name == "dout_kernel"
    assert launches[-1].metadata.shared == max(launch.metadata.shared for launch in timed) <= limit


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
