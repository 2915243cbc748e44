"""The example scripts run, and what they report is right in kind: small models, a few steps."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import convert_torch_model  # noqa: E402
import minilm_feed_forward  # noqa: E402
import train_char_lm  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.full
def test_a_language_model_learns_under_every_recipe(tmp_path, capsys):
    """40 steps: every loss falls below what equal probabilities give, and none is far from float32's."""
    small = ["--steps", "40", "--batch", "4", "--context", "32", "--width", "64", "--hidden", "64", "--layers", "1"]
    train_char_lm.main([*small, "--out", str(tmp_path), "--device", "cpu"])
    results = json.loads((tmp_path / "losses.json").read_text())
    assert set(results) == set(train_char_lm.RECIPES)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    last = {name: sum(result["losses"][-10:]) / 10 for name, result in results.items()}
    first = results["fp32"]["losses"][0]
    assert all(loss < first - 0.8 for loss in last.values()), last
    assert all(abs(loss - last["fp32"]) < 0.15 for loss in last.values()), last
    assert len({tuple(result["losses"]) for result in results.values()}) == len(results), "two recipes did the same"
    assert "nvfp4" in capsys.readouterr().out


def test_errors_of_a_real_block_are_those_of_the_formats(capsys):
    """Relative errors: bf16 far below FP8, FP8 below FP4; FP8 within its half step of 2^-4."""
    tensors = minilm_feed_forward.load_file(minilm_feed_forward.DATA)
    x = tensors["layer3.ffn.input"]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    truth = minilm_feed_forward.run(minilm_feed_forward.exact_block(tensors), x, dy)
    errors = {
        name: minilm_feed_forward.errors_under(recipe, tensors, x, dy, truth)
        for name, recipe in minilm_feed_forward.RECIPES.items()
    }
    for i in range(3):
        eight_bits = [error[i] for name, error in errors.items() if "fp8" in name]
        assert errors["none (bf16)"][i] < 0.01 < min(eight_bits) and max(eight_bits) < 0.125 < errors["nvfp4"][i] < 0.5
    minilm_feed_forward.main([])
    assert "mxfp8" in capsys.readouterr().out


@pytest.mark.full
def test_torch_models_are_compared_converted_and_trained(tmp_path, capsys):
    """A few steps from one start: losses fall, and differ in the third digit; pictures and tables are there."""
    small = ["--recipes", "mxfp8", "--steps", "30", "--batch", "4", "--context", "32", "--width", "32", "--layers", "1"]
    convert_torch_model.main([*small, "--out", str(tmp_path)])
    losses = {name: run["losses"] for name, run in json.loads((tmp_path / "losses.json").read_text()).items()}
    assert set(losses) == {"fp32", "mxfp8"}
    assert all(run[-1] < run[0] - 0.3 for run in losses.values())
    assert 0 < abs(losses["fp32"][0] - losses["mxfp8"][0]) < 0.02
    for picture in ("errors.png", "losses.png", "statistics.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for line in ("NVFP4BlockScaling", "2 grad_output", "blocks.0.feed_forward.1 grad_output"):
        assert line in printed
