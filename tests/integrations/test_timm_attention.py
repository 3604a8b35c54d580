"""timm.create_model(…, attn_layer=…) with our attention: timm's names, numbers and checkpoints, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support import optional

import overtone as ot
from overtone.integrations import timm_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def create(**options):
    torch.manual_seed(0)
    return optional.timm().create_model("vit_tiny_patch16_224", **{**SIZES, **options}).double()


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False, "proj_bias": False}, {"init_values": 0.1}])
def test_free_ones_have_timms_names_and_numbers(options):
    theirs, ours = create(**options), create(attn_layer=timm_attention(), **options)
    assert all(type(block.attn) is ot.nn.SpectralAttention for block in ours.blocks)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (theirs, ours)]
    assert shapes[0] == shapes[1]
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    found, wanted = ours(images()), theirs(images())
    torch.testing.assert_close(found, wanted)
    grads = [
        torch.autograd.grad(y.square().sum(), list(model.parameters()))
        for y, model in ((found, ours), (wanted, theirs))
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["symmetric", "general"])
def test_spectra(kind):
    model = create(attn_layer=timm_attention("sharpen", kind, bounded=True), drop_path_rate=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(images()), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    guarantees = ot.spectrum.guarantees(model)
    assert len(guarantees) == 2 and all(each.holds for each in guarantees)
    model.eval()
    torch.testing.assert_close(ot.spectrum.fold(model)(images()), model(images()))
    assert len(ot.analysis.analyze(model.float(), images().float()).layers) == 2


def test_masks_go_through():
    theirs, ours = create(), create(attn_layer=timm_attention())
    ours.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(2, 5, 24).double(), torch.rand(5, 5) < 0.7
    for options in ({"is_causal": True}, {"attn_mask": mask | torch.eye(5).bool()}):
        torch.testing.assert_close(ours.blocks[0].attn(x, **options), theirs.blocks[0].attn(x, **options))


def test_what_it_does_not_have_is_refused():
    for options, message in [
        ({"qk_norm": True}, "timm_attention: qk_norm: got bool True, which it does not have"),
        ({"proj_drop_rate": 0.1}, "timm_attention: proj_drop: got float 0.1, which it does not have"),
    ]:
        with pytest.raises(ValueError, match=message):
            create(attn_layer=timm_attention(), **options)
    with pytest.raises(ValueError, match="regime: got 'soft', wanted 'free' or"):
        timm_attention("soft")
    with pytest.raises(TypeError, match="unexpected keyword argument 'surprise'"):
        timm_attention(surprise=1)
