"""The CUDA solvers, run on the host, on matrices of hostile scales: the CPU solvers' matrices and the same standard."""

from __future__ import annotations

import pytest
import torch
from ops.linalg.test_hostile import DTYPES, check_eigh, check_eigvals, check_qr
from support import gallery, hostile

# n and who works on a matrix, around a warp's lanes and the eight reflectors.
PATHS = ((1, "warp"), (2, "warp"), (3, "warp"), (8, "warp"), (17, "warp"), (32, "warp"), (2, "block"), (21, "block"))


def results(host_result) -> tuple[torch.Tensor, ...]:
    return (*host_result.results, host_result.info)


@pytest.mark.parametrize("dtype", DTYPES)
class TestEveryMemberIsSolvedOrTold:
    @pytest.mark.parametrize(("n", "path"), [*PATHS, (46, None)])
    def test_eigh(self, host_cuda, n, path, dtype):
        names, a = hostile.batch(n, n, dtype)
        check_eigh(
            names,
            gallery.symmetrized(a),
            lambda a: results(host_cuda.eigh(a, path)),
            lambda a: (host_cuda.eigh(a, path, vectors=False).results[0], host_cuda.eigh(a, path).info),
        )

    @pytest.mark.parametrize(("n", "path"), [*PATHS, (4, "block_global"), (46, "block_global")])
    def test_eigvals(self, host_cuda, n, path, dtype):
        check_eigvals(*hostile.batch(n, n, dtype), lambda a: results(host_cuda.eigvals(a, path)))

    @pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (7, 3), (3, 7), (17, 17), (32, 32), (32, 5)])
    def test_qr(self, host_cuda, shape, dtype):
        check_qr(*hostile.batch(*shape, dtype), lambda a: results(host_cuda.qr(a)))
