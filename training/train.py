"""Train tandem-mini; stop at a deadline with a checkpoint, an exported model, a loss log and scores.

    python -m training.train --out .ckpt --deadline-s 560
    python -m training.train --out .ckpt2 --resume .ckpt --lr 1e-3 --seed 2 --extra diary=2 --deadline-s 370

Each run is one cycle of the learning rate: a short warm-up, a plateau, and a straight fall to zero, along the steps
(`--steps`) or along the time up to the deadline, whichever is further. The time begins once the first step has run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from accuracy.gsm_mini import few_shot, problems
from training.data import BlockFeed, scheme_names
from training.evaluate import score
from training.export import export, load_exported
from training.model import ModelConfig, NemotronH

LossFunction = Callable[[NemotronH, Tensor], tuple[Tensor, Tensor]]


def learning_rate(progress: float, peak: float, step: int, warmup: int = 150, plateau: float = 0.35) -> float:
    """The rate at `progress` (0 to 1) through a run whose `step` counts from 0."""
    fall = min(1.0, (1.0 - progress) / (1.0 - plateau))
    return peak * max(fall, 0.0) * min(1.0, (step + 1) / warmup)


def answer_mask(tokens: Tensor, question_id: int, answer_id: int) -> Tensor:
    """True where the newest of "Question" and "Answer" is "Answer"; tokens [B, L] -> [B, L]."""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    question, answer = (torch.where(tokens == token, place, -1).cummax(1).values for token in (question_id, answer_id))
    return answer > question


def make_loss(tokenizer: Tokenizer, question_weight: float) -> LossFunction:
    """Cross entropy in which tokens of a question count `question_weight`, for they are mostly chance."""
    question_id, answer_id = tokenizer.token_to_id("Question"), tokenizer.token_to_id("Answer")

    def loss(model: NemotronH, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B, L + 1] -> the loss and the mean loss of answer tokens alone."""
        tokens = rows.long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = model(inputs).float()
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        mask = answer_mask(inputs, question_id, answer_id).float()
        weight = mask + question_weight * (1 - mask)
        return (each * weight).sum() / weight.sum(), (each * mask).sum() / mask.sum()

    return loss


def make_optimizer(model: nn.Module, peak: float, weight_decay: float, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embeddings" in name]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=fused)


# --- Checkpoints: files of at most half the parameters, the moments in bfloat16 -------------------------------------


def save_checkpoint(model: NemotronH, optimizer: torch.optim.AdamW, folder: Path, state: dict[str, Any]) -> None:
    """Write parameters (float32, two files), both moments (bfloat16, one file each) and `state`."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    names = list(parameters)
    half = len(names) // 2
    metadata = {"state": json.dumps(state)}
    for i, part in enumerate((names[:half], names[half:])):
        save_file({n: parameters[n] for n in part}, folder / f"parameters_{i}.safetensors", metadata)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {n: optimizer.state[p][key].to("cpu", torch.bfloat16) for n, p in model.named_parameters()}
        save_file(moments, folder / f"{key}.safetensors")


def load_parameters(model: NemotronH, folder: Path) -> dict[str, Any]:
    """Read a checkpoint's parameters into `model`; returns the state saved with them."""
    files = sorted(folder.glob("parameters_*.safetensors"))
    model.load_state_dict({name: tensor for file in files for name, tensor in load_file(file).items()})
    with safe_open(files[0], "pt") as opened:
        state: dict[str, Any] = json.loads(opened.metadata()["state"])
    return state


def load_moments(model: NemotronH, optimizer: torch.optim.AdamW, folder: Path, step: int) -> None:
    """Read a checkpoint's moments into `optimizer`."""
    first, second = (load_file(folder / f"{key}.safetensors") for key in ("exp_avg", "exp_avg_sq"))
    for name, p in model.named_parameters():
        optimizer.state[p] = {
            "step": torch.tensor(float(step), device=p.device),
            "exp_avg": first[name].to(p.device, torch.float32),
            "exp_avg_sq": second[name].to(p.device, torch.float32),
        }


# --- The run --------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train until the deadline or the last step, then write everything into args.out."""
    began = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device, cuda = torch.device(args.device), args.device.startswith("cuda")
    tokenizer_path = args.tokenizer / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    model = NemotronH(ModelConfig())
    state: dict[str, Any] = {"step": 0, "tokens": 0}
    if args.resume:
        state = load_parameters(model, args.resume)
    model.to(device)
    optimizer = make_optimizer(model, args.lr, args.weight_decay, fused=cuda)
    if args.resume:
        load_moments(model, optimizer, args.resume, state["step"])
    loss_function = make_loss(tokenizer, args.question_weight)
    if args.compile:
        loss_function = torch.compile(loss_function)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"parameters {model.num_parameters()}, from step {state['step']}", flush=True)

    block_rows = args.batch * args.block_batches
    feeding = {"workers": args.workers, "rows": block_rows, "row_tokens": args.length + 1}
    schemes = scheme_names(args.extra)
    with (
        BlockFeed(tokenizer_path, seed=args.seed, schemes=schemes, **feeding) as feed,
        (args.out / "loss.jsonl").open("w") as log,
    ):
        rows = torch.empty(0)
        first, step, started = state["step"], 0, 0.0
        answer_losses: list[Tensor] = []
        while True:
            now = time.monotonic()
            left = began + args.deadline_s - now
            progress = step / args.steps if args.steps else 0.0
            progress = max(progress, (now - started) / (now - started + max(left, 0.0)) if started else 0.0)
            if progress >= 1.0 or left <= 0:
                break
            if step % args.block_batches == 0:
                rows = torch.from_numpy(feed.take().astype(np.int16)).to(device)
            place = step % args.block_batches * args.batch
            lr = learning_rate(progress, args.lr, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss, answer_loss = loss_function(model, rows[place : place + args.batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            answer_losses.append(answer_loss.detach())
            step += 1
            state["step"], state["tokens"] = first + step, state["tokens"] + args.batch * args.length
            if step == 1:
                print(f"first step: loss {loss.item():.3f} after {time.monotonic() - began:.0f} s", flush=True)
                started = time.monotonic()
            if step % args.log_every == 0:
                mean = torch.stack(answer_losses).mean().item()
                answer_losses.clear()
                entry = {
                    "step": state["step"],
                    "tokens": state["tokens"],
                    "seconds": round(time.monotonic() - began, 1),
                    "lr": lr,
                    "loss": round(loss.item(), 5),
                    "answer_loss": round(mean, 5),
                }
                log.write(json.dumps(entry) + "\n")
                if step % (args.log_every * 10) == 0:
                    print(json.dumps(entry), flush=True)
        rate = (step - 1) * args.batch * args.length / (time.monotonic() - started)
        print(f"{step} steps, {rate / 1e6:.3f} M tokens/s, {time.monotonic() - began:.0f} s", flush=True)
    save_checkpoint(model, optimizer, args.out, state)
    export(model, args.out / "export")
    report(args, tokenizer)
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


def report(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Score the exported (bfloat16) weights; write scores.json with some wrong answers."""
    scores: dict[str, Any] = {}
    asked = problems("heldout", args.eval_seed, args.eval_count)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_exported(args.out / "export", args.device).to(dtype)
        for shots in (5, 0):
            result = score(model, tokenizer, asked, few_shot(0, shots))
            name = f"{shots}-shot {str(dtype).removeprefix('torch.')}"
            scores[name] = {
                "right": result.right,
                "count": result.count,
                "wrong_by_scheme": result.wrong_by_scheme,
                "examples": result.examples,
            }
            print(f"{name}: {result.right} of {result.count}", json.dumps(result.wrong_by_scheme), flush=True)
    (args.out / "scores.json").write_text(json.dumps(scores, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tandem-mini"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch", type=int, default=64, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--block-batches", type=int, default=8, help="steps that one block of a worker lasts")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--question-weight", type=float, default=0.25)
    parser.add_argument("--extra", nargs="*", default=[], help="schemes to draw more often: name=times")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the deadline allows")
    parser.add_argument("--deadline-s", type=float, default=560, help="stop training so long after the start")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eval-count", type=int, default=1000)
    parser.add_argument("--eval-seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
