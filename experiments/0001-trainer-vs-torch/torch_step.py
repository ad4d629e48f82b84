"""The rival: the same step in plain torch, eager, with a loop over the experts. Runs in the fleet environment."""

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from experiments.worker import Values, serve

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


class Trainer:
    """Weights, batches and optimizer of a case."""

    def __init__(self, folder: Path):
        self.model, numbers = Model(folder / "weights"), json.loads((folder / "numbers.json").read_text())
        self.loss, optim = numbers["loss"], numbers["optim"]
        files = sorted(folder.glob("batch*.npz"))
        self.batches = [{name: torch.from_numpy(array) for name, array in np.load(file).items()} for file in files]
        self.num_trained = sum(int(batch["mask_BT"].sum()) for batch in self.batches)
        self.max_norm = optim["max_grad_norm"]
        weights, betas = self.model.w.values(), (optim["beta1"], optim["beta2"])
        decays = {True: optim["weight_decay"], False: 0.0}  # of matrices, of vectors
        groups = [{"params": [w for w in weights if (w.ndim > 1) == m], "weight_decay": d} for m, d in decays.items()]
        self.optimizer = torch.optim.AdamW(groups, optim["lr"], betas, optim["eps"], fused=True)
        rises = optim["warmup_steps"] + 1
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / rises))

    def step(self) -> tuple[float, float]:
        """Take one optimizer step; returns loss and gradient norm."""
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(self.backward(batch) for batch in self.batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.w.values(), self.max_norm)
        self.optimizer.step()
        self.schedule.step()
        return total, norm.item()

    def backward(self, batch: Weights) -> float:
        """Add the gradient of one micro-batch; returns its part of the loss."""
        logits = F.linear(self.model.hidden(batch), self.model.w["model.embed_tokens.weight"])
        log_probs = (logits / batch["temperatures_BT"][..., None]).log_softmax(-1)
        with torch.no_grad():  # a metric of every step, which ours computes too
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        assert torch.isfinite(entropy).all()
        logp = log_probs.gather(-1, batch["targets_BT"].long()[..., None])[..., 0]
        loss = dppo(self.loss, batch, logp) / self.num_trained
        loss.backward()
        return loss.item()


trainers: list[Trainer] = []


def load(folder: str, **ignored: object) -> Values:
    """Read weights and batches of a case."""
    trainers.append(Trainer(Path(folder)))
    return {"version": torch.__version__}


def step(count: int) -> Values:
    """Take optimizer steps; returns the median time, and loss and gradient norm of each."""
    seconds, results = [], []
    for _ in range(count):
        started = time.perf_counter()
        results.append(trainers[0].step())
        seconds.append(time.perf_counter() - started)
    losses, norms = zip(*results, strict=True)
    return {"seconds": statistics.median(seconds), "losses": losses, "norms": norms}


serve({"load": load, "step": step})
