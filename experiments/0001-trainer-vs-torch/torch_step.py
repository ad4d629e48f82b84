"""The rival: the same step in plain torch, eager, as trainers of today write it; the experts are a loop.

Reads a Hugging Face directory and knows its names only. Runs in the fleet environment.
"""

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from experiments.worker import Values, serve
from safetensors.torch import load_file

torch.set_num_threads(2)
Weights = dict[str, torch.Tensor]


class Model:
    """Decoder of the Llama and Qwen3-MoE families; the mask keeps packed sequences apart."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.w = {name: tensor.float().requires_grad_() for name, tensor in tensors.items()}

    def hidden(self, batch: Weights) -> torch.Tensor:
        """Return [B, T, D] after the final norm."""
        c, w = self.config, self.w
        x = F.embedding(batch["tokens_BT"], w["model.embed_tokens.weight"])
        positions, segments = batch["positions_BT"], batch["segments_BT"]
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        inverse = c["rope_theta"] ** -(torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = (positions[..., None] * inverse)[:, None]
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self.attention(layer + "self_attn.", self.norm(x, layer + "input_layernorm"), angles, mask)
            normed = self.norm(x, layer + "post_attention_layernorm")
            x = x + (self.experts if "num_experts" in c else self.mlp)(layer + "mlp.", normed)
        return self.norm(x, "model.norm")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def attention(self, at: str, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Grouped-query attention, with QK norm where the weights have it."""

        def heads(name: str) -> torch.Tensor:
            y = F.linear(x, self.w[f"{at}{name}_proj.weight"]).unflatten(-1, (-1, self.config["head_dim"]))
            return self.norm(y, f"{at}{name}_norm") if f"{at}{name}_norm.weight" in self.w else y

        q, k, v = (heads(name).transpose(1, 2) for name in "qkv")
        q, k = rotate(q, angles), rotate(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), self.w[f"{at}o_proj.weight"])

    def mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        gate, up, down = (self.w[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def experts(self, at: str, x_BTD: torch.Tensor) -> torch.Tensor:
        """Softmax top-k routing, one expert after the other, each on its own tokens."""
        c, x = self.config, x_BTD.flatten(0, 1)
        weights, chosen = F.linear(x, self.w[f"{at}gate.weight"]).softmax(-1).topk(c["num_experts_per_tok"])
        if c["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(c["num_experts"]):
            token, slot = torch.where(chosen == e)
            y.index_add_(0, token, self.mlp(f"{at}experts.{e}.", x[token]) * weights[token, slot, None])
        return y.view_as(x_BTD)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the two halves of each head."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def dppo(c: dict[str, float], batch: Weights, logp: torch.Tensor) -> torch.Tensor:
    """Return the summed dppo loss of the trained tokens (rl_jax/losses.py has the formula)."""
    mask, advantages, theirs = (batch[f"{name}_BT"] for name in ("mask", "advantages", "logprobs"))
    logp, theirs, advantages = logp[mask], theirs[mask], advantages[mask]
    delta, log_rho = logp.exp() - theirs.exp(), logp - theirs
    low = (advantages <= 0) & (delta < -c["dppo_mask_low"])
    high = (advantages > 0) & (delta > c["dppo_mask_high"])
    keep = torch.where(low | high, 0.0, c["adv_tau"])
    return (-keep * advantages * log_rho.exp() + c["kl_tau"] * log_rho**2).sum()


class State:
    """What `load` fills."""

    model: Model
    optimizer: torch.optim.Optimizer
    batches: list[Weights]
    numbers: dict[str, dict[str, float]]


def load(folder: str, **ignored: object) -> Values:
    """Read weights and batches of a case."""
    root = Path(folder)
    State.model, State.numbers = Model(root / "weights"), json.loads((root / "numbers.json").read_text())
    files = sorted(root.glob("batch*.npz"))
    State.batches = [{name: torch.from_numpy(array) for name, array in np.load(file).items()} for file in files]
    for batch in State.batches:
        batch |= {name: batch[name].long() for name in ("tokens_BT", "targets_BT")}
    c = State.numbers["optim"]
    groups = {0.0: [], c["weight_decay"]: []}
    for weight in State.model.w.values():
        groups[c["weight_decay"] if weight.ndim > 1 else 0.0].append(weight)
    options = [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
    State.optimizer = torch.optim.AdamW(options, c["lr"], (c["beta1"], c["beta2"]), c["eps"], fused=True)
    State.warmup = torch.optim.lr_scheduler.LambdaLR(
        State.optimizer, lambda step: min(1.0, (step + 1) / (c["warmup_steps"] + 1))
    )
    return {"version": torch.__version__}


def train() -> tuple[float, float]:
    """Take one optimizer step; returns loss and gradient norm."""
    State.optimizer.zero_grad(set_to_none=True)
    num_trained = sum(int(batch["mask_BT"].sum()) for batch in State.batches)
    total = 0.0
    for batch in State.batches:
        logits = F.linear(State.model.hidden(batch), State.model.w["model.embed_tokens.weight"])
        log_probs = (logits / batch["temperatures_BT"][..., None]).log_softmax(-1)
        with torch.no_grad():  # the entropy is a metric of every step, ours computes it too
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        logp = log_probs.gather(-1, batch["targets_BT"][..., None]).squeeze(-1)
        loss = dppo(State.numbers["loss"], batch, logp) / num_trained
        loss.backward()
        total += loss.item()
        assert torch.isfinite(entropy).all()
    norm = torch.nn.utils.clip_grad_norm_(State.model.w.values(), State.numbers["optim"]["max_grad_norm"])
    State.optimizer.step()
    State.warmup.step()
    return total, norm.item()


def step(count: int) -> Values:
    """Take optimizer steps; returns the median time, and loss and gradient norm of each."""
    seconds, results = [], []
    for _ in range(count):
        started = time.perf_counter()
        results.append(train())
        seconds.append(time.perf_counter() - started)
    losses, norms = zip(*results, strict=True)
    return {"seconds": statistics.median(seconds), "losses": losses, "norms": norms}


serve({"load": load, "step": step})
