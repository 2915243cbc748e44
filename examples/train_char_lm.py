"""Train one small language model under each recipe and compare the loss curves, on a CPU or a GPU.

A character-level transformer of fuser ops (RMSNorm, Linear, SwiGLU, Linear) and torch's attention reads this project's
own documentation. Every run starts from the same weights and sees the same batches, so the curves differ by the
number formats of the GEMM operands alone: embedding, attention and output layer stay in high precision.

    python examples/train_char_lm.py                       # all recipes, 300 steps each
    python examples/train_char_lm.py --recipes fp32 nvfp4  # some of them

Prints a table; writes losses as JSON and the curves as PNG to --out.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fuser
from fuser import ops
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from refops.replacing import replacing

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("docs/spec/quantization.md", "docs/spec/activations.md")
#: name -> (dtype of the model, recipe); NVFP4's defaults are TE's: 2D weights, RHT, stochastic rounding of gradients.
RECIPES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp8-delayed": (torch.bfloat16, DelayedScaling),
    "fp8-current": (torch.bfloat16, Float8CurrentScaling),
    "fp8-block": (torch.bfloat16, Float8BlockScaling),
    "mxfp8": (torch.bfloat16, MXFP8BlockScaling),
    "nvfp4": (torch.bfloat16, NVFP4BlockScaling),
}


class Attention(torch.nn.Module):
    """Causal attention between two pipelines of ops; the residual goes through a named channel of its own."""

    def __init__(self, width, heads, dtype):
        super().__init__()
        self.heads = heads
        self.into = ops.Sequential(
            ops.RMSNorm(width, dtype=dtype), ops.Linear(width, 3 * width, bias=False, dtype=dtype)
        )
        self.out = ops.Sequential(ops.Linear(width, width, bias=False, dtype=dtype), ops.AddExtraInput())

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.into(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width), x)


def feed_forward(width, hidden, dtype):
    """RMSNorm, Linear, SwiGLU, Linear and the residual, in one pipeline: the fuser sees all of it."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, dtype=dtype),
        ops.Linear(width, 2 * hidden, bias=False, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(hidden, width, bias=False, dtype=dtype),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


class LanguageModel(torch.nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters, *, width, hidden, layers, heads, context, dtype):
        super().__init__()
        self.token = torch.nn.Embedding(characters, width, dtype=dtype)
        self.position = torch.nn.Parameter(torch.zeros(context, width, dtype=dtype))
        blocks = []
        for _ in range(layers):
            blocks += [Attention(width, heads, dtype), feed_forward(width, hidden, dtype)]
        self.blocks = torch.nn.Sequential(*blocks)
        self.norm = torch.nn.RMSNorm(width, dtype=dtype)
        self.head = torch.nn.Linear(width, characters, bias=False, dtype=dtype)

    def forward(self, tokens, recipe):
        x = self.token(tokens) + self.position[: tokens.shape[-1]]
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            x = self.blocks(x)
        return self.head(self.norm(x))


def batches(text, context, batch, steps, seed):
    """Yield `steps` pairs (inputs, targets), int64 (batch, context), from random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch,), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


def train(name, text, characters, options, advance):
    """Return the losses of one run, and its seconds."""
    dtype, recipe_class = RECIPES[name]
    recipe = recipe_class() if recipe_class else None
    torch.manual_seed(options.seed)
    shape = {"width": options.width, "hidden": options.hidden, "layers": options.layers, "heads": options.heads}
    model = LanguageModel(characters, **shape, context=options.context, dtype=torch.float32)
    model = model.to(options.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses, start = [], time.perf_counter()
    for tokens, targets in batches(text, options.context, options.batch, options.steps, options.seed):
        logits = model(tokens.to(options.device), recipe)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten().to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        advance(losses[-1])
    return losses, time.perf_counter() - start


def smooth(losses, window=20):
    """The mean of the last `window` losses at each step."""
    sums = torch.tensor(losses).cumsum(0)
    return [
        (sums[i] - (sums[i - window] if i >= window else 0)).item() / min(i + 1, window) for i in range(len(losses))
    ]


def plot(results, path):
    """Draw the loss curves, and below them how far each lies above fp32 (or the first run)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    baseline = smooth(next(iter(results.values()))["losses"])
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    for (name, result), style in zip(results.items(), ("-", "--", "-.", ":") * 2, strict=False):
        curve = smooth(result["losses"])
        above.plot(curve, style, label=name)
        below.plot([a - b for a, b in zip(curve, baseline, strict=True)], style)
    above.set_ylabel("cross-entropy [nats per character]")
    below.set_ylabel(f"minus {next(iter(results))} [nats]")
    below.set_xlabel("step (mean of the last 20)")
    above.legend()
    figure.tight_layout()
    with replacing(path) as new:
        figure.savefig(new, dpi=150)


def table_of(results):
    """Return the rich table of final losses and times."""
    table = Table(title="A character language model under each recipe", caption="loss: mean of the last 20 steps, nats")
    for heading in ("recipe", "loss", f"minus {next(iter(results))}", "seconds"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    first = None
    for name, result in results.items():
        loss = smooth(result["losses"])[-1]
        first = loss if first is None else first
        table.add_row(name, f"{loss:.4f}", f"{loss - first:+.4f}", f"{result['seconds']:.1f}")
    return table


def main(arguments=None):
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="which runs (default: all)"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("train_char_lm"), help="folder for losses.json and losses.png")
    options = parser.parse_args(arguments)

    text = "".join((ROOT / path).read_text() for path in TEXT)
    alphabet = sorted(set(text))
    code = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([code[character] for character in text])
    console = Console()
    console.print(f"{len(text):,} characters, {len(alphabet)} different; {options.steps} steps of "
                  f"{options.batch} x {options.context} on {options.device}")  # fmt: skip
    results = {}
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("loss {task.fields[loss]:.3f}"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        for name in options.recipes:
            task = progress.add_task(name, total=options.steps, loss=float("nan"))
            losses, seconds = train(
                name,
                encoded,
                len(alphabet),
                options,
                lambda loss, task=task: progress.update(task, advance=1, loss=loss),
            )
            results[name] = {"losses": losses, "seconds": seconds}
    console.print(table_of(results))
    options.out.mkdir(parents=True, exist_ok=True)
    with replacing(options.out / "losses.json") as new:
        new.write_text(json.dumps(results))
    plot(results, options.out / "losses.png")
    console.print(f"wrote {options.out / 'losses.json'} and {options.out / 'losses.png'}")


if __name__ == "__main__":
    main()
