"""Take models that are written with torch.nn alone, and see what a recipe does to them: convert, compare, statistics.

First the feed-forward block of MiniLM's encoder layer 3 (real weights, real inputs of eight sentence pairs, the real
size of gradients; tests/data) is compared under every recipe. Then a small causal transformer of torch.nn reads this
project's documentation: each run converts the same model under another recipe and trains it from the same start on the
same batches.

    python examples/convert_torch_model.py                       # MXFP8 and NVFP4, 150 steps each
    python examples/convert_torch_model.py --recipes mxfp8 --steps 50

Prints tables; writes errors.png, losses.png, statistics.png and losses.json to --out.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
from minilm_feed_forward import DATA, load
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from train_char_lm import RECIPES, ROOT, TEXT, batches, plot, table_of

import fuser
from refops.replacing import replacing


class Block(nn.Module):
    """Causal attention and a feed-forward network, each after a norm and around a residual, all of it torch's."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class LanguageModel(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters, *, width, layers, heads, context):
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def feed_forward_of_minilm():
    """Return (block of torch modules with MiniLM's weights, its input, a gradient of its output at the real size)."""
    tensors = load_file(DATA)
    block = nn.Sequential(nn.Linear(384, 1536), nn.GELU("tanh"), nn.Linear(1536, 384))
    load(block[0], block[2], tensors)
    x = tensors["layer3.ffn.input"].float()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return block, x, gradient * tensors["layer3.ffn.grad_activation"].float().std()


def train(name, text, characters, options):
    """Return the losses of one run and its seconds, and the statistics of the casts of every 20th step."""
    torch.manual_seed(options.seed)
    shape = {"width": options.width, "layers": options.layers, "heads": options.heads, "context": options.context}
    model = LanguageModel(characters, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    recipe = RECIPES[name][1]
    if recipe is not None:
        fuser.convert(model, {"head": None, "*": recipe()})  # the optimizer, made before, keeps its parameters
    losses, start = [], time.perf_counter()
    with fuser.statistics(model, every=20) if recipe is not None else contextlib.nullcontext() as statistics:
        for tokens, targets in batches(text, options.context, options.batch, options.steps, options.seed):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "seconds": time.perf_counter() - start}, statistics


def main(arguments=None):
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, (_, recipe) in RECIPES.items() if recipe is not None]
    parser.add_argument("--recipes", nargs="+", choices=names, default=["mxfp8", "nvfp4"], help="what to train under")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("convert_torch_model"), help="folder for pictures and losses")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    block, x, gradient = feed_forward_of_minilm()
    console.print("MiniLM's feed-forward block, layer 3")
    fuser.compare(block, x, loss=lambda y: (y * gradient).sum(), plot=options.out / "errors.png")

    text = "".join((ROOT / path).read_text() for path in TEXT)
    alphabet = sorted(set(text))
    code = {character: i for i, character in enumerate(alphabet)}
    encoded, results = torch.tensor([code[character] for character in text]), {}
    for name in ("fp32", *options.recipes):
        results[name], statistics = train(name, encoded, len(alphabet), options)
        if statistics is not None:
            console.print(f"\nCasts under {name}, the worst of every 20th step")
            print(statistics)
            statistics.plot(options.out / "statistics.png")
    console.print(table_of(results))
    with replacing(options.out / "losses.json") as new:
        new.write_text(json.dumps(results))
    plot(results, options.out / "losses.png")
    console.print(f"wrote pictures and losses to {options.out}")


if __name__ == "__main__":
    main()
