"""The choice of a backend: named ones run or raise, the default chooses, and nothing is silent."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import overtone as ot
from overtone import _extension
from overtone.nn.linear import Mlp
from overtone.ops.linear import linear


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_backends_lists_every_backend_with_a_reason():
    status = ot.backends()
    assert list(status) == ["reference", "cpu", "triton", "cuda"]
    assert status["reference"].available
    assert all(line.detail for line in status.values())


def test_the_default_takes_the_kernels(cpu_kernels):
    ot.frequency_norms(torch.randn(2, 3, 4))
    assert cpu_kernels.last_kernel() == f"frequency_norms/{cpu_kernels.isa()}"


def test_a_named_backend_runs(cpu_kernels):
    x = torch.randn(2, 3, 4)
    ot.frequency_filter(x, 1.0, 1.0)
    ot.frequency_norms(x, backend="reference")
    assert cpu_kernels.last_kernel().startswith("frequency_filter/")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("triton", ["frequency_norms", "triton", "cuda", "got one on cpu"]),
        ("cuda", ["cuda", "no cuda kernel", "triton"]),
    ],
)
def test_a_named_backend_that_cannot_run_raises(backend, words):
    with pytest.raises(ot.BackendError) as raised:
        ot.frequency_norms(torch.randn(2, 3, 4), backend=backend)
    for word in words:
        assert raised.match(word)


def test_the_cpu_backend_refuses_other_devices():
    with pytest.raises(ot.BackendError, match="needs a tensor on cpu, got one on meta"):
        ot.frequency_norms(torch.randn(2, 3, 4, device="meta"), backend="cpu")


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="got 'gpu', wanted one of 'reference', 'cpu', 'triton', 'cuda' or None"):
        ot.frequency_norms(torch.randn(2, 3, 4), backend="gpu")
    with pytest.raises(ValueError, match="'gpu'"), ot.use_backend("gpu"):
        pass


def test_use_backend_holds_inside_and_is_undone(cpu_kernels):
    x = torch.randn(2, 3, 4)
    ot.frequency_filter(x, 1.0, 1.0)
    with ot.use_backend("reference"):
        ot.frequency_norms(x)
        assert cpu_kernels.last_kernel().startswith("frequency_filter/")
        ot.frequency_norms(x, backend="cpu")
        assert cpu_kernels.last_kernel().startswith("frequency_norms/")
    with pytest.raises(RuntimeError, match="inner"), ot.use_backend("reference"):
        raise RuntimeError("inner")
    ot.frequency_filter(x, 1.0, 1.0)
    ot.frequency_norms(x)
    assert cpu_kernels.last_kernel().startswith("frequency_norms/")


def test_without_the_extension_the_reference_runs_and_says_so_once():
    code = (
        "import warnings, torch, overtone as ot\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): ot.frequency_norms(torch.randn(2, 3, 4)); ot.de_escalate(torch.randn(3, 4))\n"
        "assert len(caught) == 1, [str(w.message) for w in caught]\n"
        "assert 'OVERTONE_SKIP_EXTENSION' in str(caught[0].message)\n"
        "try: ot.frequency_norms(torch.randn(2, 3, 4), backend='cpu')\n"
        "except ot.BackendError as error: assert 'OVERTONE_SKIP_EXTENSION' in str(error)\n"
        "else: raise AssertionError('backend cpu ran')\n"
    )
    result = run_python(code, OVERTONE_SKIP_EXTENSION="1")
    assert result.returncode == 0, result.stderr


@pytest.mark.usefixtures("cpu_kernels")
class TestIsaSwitch:
    def test_the_environment_caps_the_level(self):
        result = run_python("from overtone import _C; print(_C.isa())", OVERTONE_CPU_ISA="baseline")
        assert result.stdout.strip() == "baseline"

    def test_an_unknown_level_is_named(self):
        with pytest.raises(ValueError, match="unknown instruction set 'sse9'; wanted one of baseline, avx2, avx512"):
            _extension.module.set_isa("sse9")

    def test_an_unknown_level_in_the_environment_is_named(self):
        result = run_python("import overtone", OVERTONE_CPU_ISA="sse9")
        assert result.returncode != 0
        assert "OVERTONE_CPU_ISA: unknown instruction set 'sse9'" in result.stderr


def test_importing_touches_no_device_and_imports_no_triton():
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: (_ for _ in ()).throw(AssertionError('touched a device'))\n"
        "import overtone\n"
        "assert 'triton' not in sys.modules or 'triton' in str(torch.__spec__), 'triton was imported'\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def on_cuda(n: int, requires_grad: bool = False) -> SimpleNamespace:
    """What the choice of a backend looks at, of a tensor that this machine need not be able to hold."""
    return SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, shape=(2, n, n), requires_grad=requires_grad
    )


def test_cuda_tensors_go_to_the_cuda_kernels_that_exist(monkeypatch):
    module = sys.modules["overtone.backends"]  # the name in the package is the public function
    choose = module.select
    assert choose("inverse", None, on_cuda(768)) == "cuda"  # by batched products, always there
    monkeypatch.setattr(_extension, "module", SimpleNamespace())
    assert choose("eigh", None, on_cuda(16)) == "reference"
    with pytest.raises(ot.BackendError, match="built without its CUDA kernels"):
        choose("eigh", "cuda", on_cuda(16))
    limits = {"eigh": 154, "eig": 197, "qr": 32}

    def cuda_limit(solver, dtype, device):
        assert (dtype, device) == ("float32", -1)
        return limits[solver]

    monkeypatch.setattr(_extension, "module", SimpleNamespace(has_cuda=True, cuda_limit=cuda_limit))
    assert choose("eigh", None, on_cuda(154)) == choose("eigvals", None, on_cuda(197)) == "cuda"
    for op, tensor, reason in (
        ("eigh", on_cuda(155), "supports n ≤ 154 on this device, got 155"),
        ("qr", on_cuda(33), "supports n ≤ 32 on this device, got 33"),
        ("eigvals", on_cuda(16, requires_grad=True), "computes eigenvalues only, without gradient"),
        ("eig", on_cuda(16), "no cuda kernel for eig"),
    ):
        assert choose(op, None, tensor) == "reference"  # torch.linalg
        with pytest.raises(ot.BackendError, match=reason):
            choose(op, "cuda", tensor)


def test_backend_for_says_what_runs_where(cpu_kernels):
    module = sys.modules["overtone.backends"]
    assert module.backend_for("spectral_attention", "cpu") == "cpu"
    assert module.backend_for("linear", "cuda") == "reference"
    with ot.use_backend("reference"):
        assert module.backend_for("eigh", torch.device("cpu")) == "reference"
    with ot.use_backend("cuda"), pytest.raises(ot.BackendError, match="linear: backend 'cuda' cannot run on cpu"):
        module.backend_for("linear", "cpu")


def test_linear_runs_where_it_was_told_to_or_raises(cpu_kernels):
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with ot.use_backend("cpu"):
        linear(x, weight)
        assert cpu_kernels.last_kernel() == f"linear/{cpu_kernels.isa()}"
    with ot.use_backend("triton"), pytest.raises(ot.BackendError, match="no triton kernel for linear"):
        linear(x, weight)
    layers = Mlp(4, 8)
    with ot.use_backend("triton"):  # a layer that PyTorch has, too, is PyTorch's there
        assert torch.equal(layers(x), layers.fc2(torch.nn.functional.gelu(layers.fc1(x))))
