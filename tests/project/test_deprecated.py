"""Old names of keywords and values: they work, warn at the caller's line, and never override the new name."""

from __future__ import annotations

import inspect
import warnings

import pytest

from overtone._deprecated import accepts_renamed, renamed_keywords, renamed_value


def train(**options):
    return renamed_keywords("train", options, {"workers": "num_workers", "clip": "clip_grad_norm"})


@accepts_renamed("build", width="dim")
def build(depth, *, dim=3):
    return depth, dim


def warned_at_the_call(record):
    return [str(each.message) for each in record if each.filename == __file__]


def test_old_keywords_are_renamed_and_named():
    with pytest.warns(DeprecationWarning) as record:
        assert train(workers=2, clip=None, seed=1) == {"num_workers": 2, "clip_grad_norm": None, "seed": 1}
    assert warned_at_the_call(record) == [
        "train: workers is deprecated, use num_workers",
        "train: clip is deprecated, use clip_grad_norm",
    ]


def test_old_and_new_together_are_refused():
    with pytest.raises(TypeError, match="train: got both workers and num_workers, wanted num_workers alone"):
        train(workers=2, num_workers=2)


def test_old_values():
    def call(value):
        return renamed_value("build", "method", value, {"centred": "centered"})

    with pytest.warns(DeprecationWarning, match="build: method='centred' is deprecated, use 'centered'") as record:
        assert call("centred") == "centered"
    assert len(warned_at_the_call(record)) == 1


def test_new_names_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(num_workers=2) == {"num_workers": 2}
        assert renamed_value("build", "method", "plain", {"centred": "centered"}) == "plain"
        assert renamed_value("build", "method", ["centred"], {"centred": "centered"}) == ["centred"]
        assert build(1, dim=2) == (1, 2)


def test_a_decorated_function_keeps_its_signature():
    assert list(inspect.signature(build).parameters) == ["depth", "dim"]
    with pytest.warns(DeprecationWarning, match="build: width is deprecated, use dim") as record:
        assert build(1, width=2) == (1, 2)
    assert len(warned_at_the_call(record)) == 1
    with pytest.raises(TypeError, match="colour"):
        build(1, colour=2)
